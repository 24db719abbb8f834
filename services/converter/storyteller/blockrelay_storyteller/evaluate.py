"""Measures a model on documents that training never saw: perplexity and the share of right answers.

    python -m blockrelay_storyteller.evaluate FOLDER [--documents 400] [--rounded] [--prompt TEXT]...

FOLDER is a checkpoint (run by torch in float32; with --rounded as w8a8 rounds) or a block folder (run by the worker's
executor, without torch). An answer is right when greedy decoding writes it token for token.
"""

import argparse
import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from blockrelay_storyteller.corpus.documents import SPECIALS, Document, document

log = logging.getLogger("evaluate")

#: Seed of the documents that training never uses.
HELD_OUT = "held-out"
#: Longer documents (in tokens) are not measured.
LONGEST = 1024

#: A function from token ids to their logits (float32 [length, vocab]); row i predicts id i + 1.
Logits = Callable[[list[int]], NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionResult:
    """The perplexity and the right answers of a model on a set of documents."""

    perplexity: float
    """exp of the mean loss per token."""
    by_kind: dict[str, tuple[int, int]]
    """Numbers of right answers and of questions, by kind of question."""

    def share(self) -> float:
        """Returns the share of right answers, 0 to 1. There must have been a question."""
        right = sum(right for right, _ in self.by_kind.values())
        return right / sum(questions for _, questions in self.by_kind.values())


def measure(logits_of: Logits, tokenizer: Tokenizer, documents: list[Document]) -> QuestionResult:
    """Measures a model on documents. An answer is right when each of its tokens has the largest logit.

    Greedy decoding then writes exactly this answer. Documents of more than LONGEST tokens are left out; at least one
    must be left, with two tokens or more.
    """
    loss, tokens = 0.0, 0
    right: Counter[str] = Counter()
    questions: Counter[str] = Counter()
    for segments in documents:
        pieces: list[list[int]] = [tokenizer.encode(segment.text).ids for segment in segments]
        ids = [token for piece in pieces for token in piece]
        if len(ids) > LONGEST:
            continue
        logits = logits_of(ids)[:-1]
        targets = np.array(ids[1:])
        loss += _cross_entropy(logits, targets)
        tokens += len(targets)
        hits = logits.argmax(-1) == targets
        first = 0
        for segment, piece in zip(segments, pieces, strict=True):
            if segment.question is not None:
                questions[segment.question.kind] += 1
                right[segment.question.kind] += bool(hits[first - 1 : first - 1 + len(piece)].all())
            first += len(piece)
    by_kind = {str(kind): (right[kind], questions[kind]) for kind in sorted(questions)}
    return QuestionResult(perplexity=math.exp(loss / tokens), by_kind=by_kind)


def _cross_entropy(logits: NDArray[np.float32], targets: NDArray[np.int64]) -> float:
    """Returns the cross-entropy in nats, summed over the rows of `logits` [n, vocab]."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return float((np.log(np.exp(shifted).sum(-1)) - shifted[np.arange(len(targets)), targets]).sum())


def greedy(logits_of: Logits, tokenizer: Tokenizer, prompt: str, tokens: int) -> str:
    """Returns the greedy continuation of a prompt: at most `tokens` tokens, and at most LONGEST with the prompt.

    It ends with the first special token, which is part of the text. The prompt has at least one token. No KV cache is
    used: for a person to read, not for speed.
    """
    ids: list[int] = tokenizer.encode(prompt).ids
    ends = {tokenizer.token_to_id(special) for special in SPECIALS}
    start = len(ids)
    while len(ids) < min(start + tokens, LONGEST) and (len(ids) == start or ids[-1] not in ends):
        ids.append(int(logits_of(ids)[-1].argmax()))
    return tokenizer.decode(ids[start:], skip_special_tokens=False)


def main() -> None:
    """Runs the command line: prints continuations of the prompts, then the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--beats", type=int, nargs=2, default=(2, 8), help="events in a story, least and most")
    parser.add_argument("--rounded", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", action="append", default=[])
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # Imported here: the environment of the executor need not have torch, nor the one of torch the executor.
    if (options.folder / "manifest.json").exists():
        from blockrelay_storyteller.executor import executor_logits

        logits_of = executor_logits(options.folder, options.threads)
    else:
        from blockrelay_storyteller.torch_logits import torch_logits

        logits_of = torch_logits(options.folder, options.threads, rounded=options.rounded)
    tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    for prompt in options.prompt:
        log.info("%r -> %r", prompt, greedy(logits_of, tokenizer, prompt, 200))
    if options.documents == 0:
        return
    beats: tuple[int, int] = tuple(options.beats)
    result = measure(logits_of, tokenizer, [document(HELD_OUT, n, beats=beats) for n in range(options.documents)])
    for kind, (right, questions) in result.by_kind.items():
        log.info("%-20s %5d of %5d", kind, right, questions)
    questions = sum(questions for _, questions in result.by_kind.values())
    log.info("%d questions, right %.2f %%, perplexity %.4f", questions, 100 * result.share(), result.perplexity)


if __name__ == "__main__":
    main()

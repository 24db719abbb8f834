"""Measures a checkpoint on documents that training never saw: perplexity and the share of right answers.

    python -m bundled.evaluate CHECKPOINT [--blocks BLOCK_FOLDER] [--documents 400]

An answer is right when greedy decoding writes it token for token. The checkpoint is measured in float32, then once
more with every linear map rounded as the w8a8 executor does; --blocks measures a converted folder by the executor.
"""

import argparse
import json
import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from bundled import corpus, model
from bundled.documents import Document, document

log = logging.getLogger("evaluate")

#: The stream of documents kept for evaluation.
HELD_OUT = "held-out"

#: Logits (float32 [length, vocab]) of a list of token ids.
Logits = Callable[[list[int]], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """perplexity: exp of the mean loss per token. right: share of the answers. by_kind: kind -> (right, asked)."""

    perplexity: float
    right: float
    by_kind: dict[str, tuple[int, int]]


def held_out(documents: int, beats: tuple[int, int]) -> list[Document]:
    return [document(HELD_OUT, index, beats=beats) for index in range(documents)]


def measure(logits_of: Logits, tokenizer: corpus.Tokenizer, documents: list[Document]) -> Result:
    """An answer is right when each of its tokens has the largest logit: then greedy decoding writes just that."""
    loss, tokens = 0.0, 0
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for segments in documents:
        pieces = [tokenizer.encode(segment.text).ids for segment in segments]
        ids = [token for piece in pieces for token in piece]
        if len(ids) > 1024:
            continue
        logits = logits_of(ids)
        targets = torch.tensor(ids[1:], device=logits.device)
        loss += F.cross_entropy(logits[:-1], targets, reduction="sum").item()
        tokens += len(targets)
        hits = (logits[:-1].argmax(-1) == targets).tolist()
        first = 0
        for segment, piece in zip(segments, pieces, strict=True):
            if segment.question is not None:
                asked[segment.question.kind] += 1
                right[segment.question.kind] += all(hits[first - 1 : first - 1 + len(piece)])
            first += len(piece)
    return Result(
        perplexity=math.exp(loss / tokens),
        right=sum(right.values()) / sum(asked.values()),
        by_kind={kind: (right[kind], asked[kind]) for kind in sorted(asked)},
    )


def by_torch(net: model.Llama, device: str) -> Logits:
    def logits_of(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return net(torch.tensor([ids], device=device))[0].float()

    return logits_of


def show(name: str, result: Result) -> None:
    kinds = "  ".join(f"{kind}: {right}/{asked}" for kind, (right, asked) in result.by_kind.items())
    log.info("%s  perplexity %.3f  right %.2f %%  (%s)", name, result.perplexity, 100 * result.right, kinds)


def sample(net: model.Llama, tokenizer: corpus.Tokenizer, prompt: str, tokens: int, device: str) -> str:
    """Greedy continuation of a prompt, without a cache; for looking at."""
    ids: list[int] = tokenizer.encode(prompt).ids
    start = len(ids)
    logits_of = by_torch(net, device)
    while len(ids) < start + tokens and (len(ids) == start or ids[-1] > 1):
        ids.append(int(logits_of(ids)[-1].argmax()))
    return tokenizer.decode(ids[start:], skip_special_tokens=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--blocks", type=Path, help="a converted folder, run by the executor")
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--beats", type=int, nargs=2, default=(2, 8))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=json.loads, default=[], help="JSON list of prompts to continue")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    tokenizer = corpus.load_tokenizer(options.checkpoint)
    documents = held_out(options.documents, tuple(options.beats))
    net = model.load(options.checkpoint).to(options.device).eval()
    show("fp32           ", measure(by_torch(net, options.device), tokenizer, documents))
    net.quantise(True)
    show("w8a8, simulated", measure(by_torch(net, options.device), tokenizer, documents))
    if options.blocks:
        raise SystemExit("not yet")
    for prompt in options.prompts:
        log.info("%r -> %r", prompt, sample(net, tokenizer, prompt, 200, options.device))


if __name__ == "__main__":
    main()

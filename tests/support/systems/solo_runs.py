"""What a request gives alone: `python -m tests.support.systems.solo_runs MODEL` answers those on stdin, one by one.

No service, no batch mates, no page kept from one request to the next, no drafts: one thread, one stage. Everything
else must give these answers.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.protocol.tensors import to_float16
from blockrelay.text.tokenizer import Tokenizer, VisibleText
from blockrelay_worker.offline.pipeline import Pipeline, generate
from tests.support.systems.equality_workload import Asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`logprobs` has one list per token, log probability first, then those of the best tokens. `logits`: SHA-256 of the
    float16 rows of a tensor step, which has nothing else."""

    tokens: list[int]
    text: str = ""
    finish_reason: str = ""
    logprobs: list[list[float]] | None = None
    logits: str = ""


def solo_answers(model: Path, asks: Sequence[Asked]) -> list[Answer]:
    """Answers from a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.systems.solo_runs", str(model)],
        input=json.dumps([asked.to_dict() for asked in asks]),
        capture_output=True,
        check=True,
        text=True,
    )
    return [Answer(**fields) for fields in json.loads(done.stdout)]


class Solo:
    """Answers one request after the other in this process."""

    def __init__(self, model: Path) -> None:
        self._folder = open_block_folder(model)
        assert self._folder.tokenizer_path is not None
        self._tokenizer = Tokenizer.from_file(self._folder.tokenizer_path)
        self._pipeline = Pipeline(self._folder, stages=1, threads=1, tokens=self._folder.model.max_position)

    def answer(self, prompt: list[int], params: SamplingParams) -> Answer:
        assert params.seed is not None
        eos_ids = self._folder.model.eos_ids
        visible = VisibleText(self._tokenizer, params, eos_ids, prompt)
        done = generate(self._pipeline, prompt, params, seed=params.seed, tokenizer=self._tokenizer)
        text = visible.push_all(done.tokens) + visible.finish()
        logprobs = None
        if params.logprobs is not None:
            names = self._tokenizer.token_bytes  # as clients see them: tokens without text share one
            logprobs = [
                [chosen, *({names(token): value for token, value in one.top} | {names(one.token): chosen}).values()]
                for one in done.sampled
                for chosen in (float(one.logprob or 0.0),)
            ]
        return Answer(tokens=done.tokens, text=text, finish_reason=done.finish_reason, logprobs=logprobs)

    def logits(self, prompt: list[int]) -> "np.ndarray[Any, np.dtype[np.float16]]":
        """All logits [n, vocab], computed one token at a time."""
        rows: list[np.ndarray[Any, np.dtype[np.float16]]] = []
        for position, token in enumerate(prompt):
            rows.append(to_float16(self._pipeline.run([token], position)[0]))  # a copy of the executor's buffer
        return np.stack(rows)


def logits_digest(rows: "np.ndarray[Any, Any]") -> str:
    """Of float16 rows [n, vocab]."""
    assert rows.dtype == np.float16 and rows.ndim == 2
    return hashlib.sha256(repr(rows.shape).encode() + rows.tobytes()).hexdigest()


def main(model: str) -> None:
    solo = Solo(Path(model))
    answers: list[dict[str, Any]] = []
    for asked in json.load(sys.stdin):
        params = SamplingParams.from_dict(asked["params"])
        if asked["tensor"]:
            answer = Answer(tokens=[], logits=logits_digest(solo.logits(asked["prompt"])))
        else:
            answer = solo.answer(asked["prompt"], params)
        answers.append(asdict(answer))
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])

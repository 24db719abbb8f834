"""Greedy tokens of whole ONNX models, or of their blocks, in sessions of ONNX Runtime, and of stages that serve
them."""

from collections.abc import Iterator, Sequence

import numpy as np

from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.executor import Executor
from tests.support.models.run_onnx import Running


def of_sessions(one: Running, prompt: list[int]) -> Iterator[tuple[int, float]]:
    """Greedy tokens, by sessions that are fed their presents, and how far each is above the second best."""
    given, past = prompt, 0
    while True:
        positions = np.arange(past, past + len(given))[None]
        found = one.step(
            {
                "input_ids": np.array([given], np.int64),
                "attention_mask": np.ones((1, past + len(given)), np.int64),
                "position_ids": positions,
            }
        )
        row = found["logits"][0, -1].astype(np.float32)
        past, given = past + len(given), [int(row.argmax())]
        second, best = np.sort(row)[-2:]
        yield given[0], float(best - second)


def next_tokens(stage: Executor, rows: Sequence[tuple[list[int], int, tuple[int, ...]]]) -> list[int]:
    """The greedy token behind each of (tokens, first position, pages), computed in one batch."""
    ends = np.cumsum([len(tokens) for tokens, _, _ in rows])
    output = stage.run(
        Batch(
            segments=[Segment(rows=len(tokens), first_position=first, pages=pages) for tokens, first, pages in rows],
            tokens=np.concatenate([np.array(tokens, np.int32) for tokens, _, _ in rows]),
            wanted=[int(end) - 1 for end in ends],
        )
    )
    assert output.logits is not None and not output.not_finite
    return [int(row.argmax()) for row in output.logits]


def in_one_batch(
    stage: Executor, prompts: Sequence[list[int]], pages: Sequence[tuple[int, ...]], count: int
) -> list[list[int]]:
    """The `count` greedy tokens behind each prompt, all computed together; each has its own `pages`."""
    found = [
        [token] for token in next_tokens(stage, [(text, 0, own) for text, own in zip(prompts, pages, strict=True)])
    ]
    for _ in range(count - 1):
        rows = [
            ([tokens[-1]], len(text) + len(tokens) - 1, own)
            for text, tokens, own in zip(prompts, found, pages, strict=True)
        ]
        for tokens, token in zip(found, next_tokens(stage, rows), strict=True):
            tokens.append(token)
    return found

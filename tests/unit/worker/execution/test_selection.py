"""The largest logits of a row, where they suffice, give the same token as the whole row."""

from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_worker.execution.selection import MAX_LARGEST, TOTAL_ERROR, Largest, LogitRow, enough
from blockrelay_worker.sampling.sampler import Draw, need_of, sample

VOCABULARY = 5000


def given(row: NDArray[np.float32], params: SamplingParams, error: float = 0.0) -> LogitRow:
    """Returns the largest logits as a device does that selects them correctly and sums the row with an `error`."""
    need = need_of(params)
    if need is None:
        return row
    order = np.argsort(-row, kind="stable")[: 1 if need.greedy else MAX_LARGEST]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        inverse = np.float64(1) / need.temperature
        total = np.exp((row.astype(np.float64) - row.max()) * np.float32(inverse)).sum() * (1 + error)
    if not enough(need, row[order], float(total)):
        return row
    ids = np.sort(order[: need.top_k or None])
    return Largest(ids, row[ids], float(total))


@pytest.mark.parametrize("decimals", [None, 1], ids=["all differ", "many are equal"])
def test_the_token_is_that_of_the_whole_row(decimals: int | None) -> None:
    random, fewer = np.random.default_rng(2), 0
    settings = list(product((0.3, 1.0, 2.0), (0, 1, 40, MAX_LARGEST), (0.5, 0.95, 1.0), (0.0, 0.05)))
    for round_ in range(6):
        row = (random.normal(size=VOCABULARY) * (2, 4, 8)[round_ % 3]).astype(np.float32)
        row = row if decimals is None else row.round(decimals)
        for temperature, top_k, top_p, min_p in [(0.0, 0, 1.0, 0.0), *settings]:
            params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
            error = random.uniform(-TOTAL_ERROR, TOTAL_ERROR)
            part = given(row, params, error)
            fewer += isinstance(part, Largest)
            for position in range(5):
                whole = sample(Draw(row, params, 7, position))
                assert sample(Draw(part, params, 7, position)) == whole, (params, error)
    assert fewer > 300  # of 6 * 73: it is not always the row that is given


@pytest.mark.parametrize(
    ("params", "part"),
    [
        (SamplingParams(temperature=0), Largest),
        (SamplingParams(temperature=0, logprobs=0), np.ndarray),  # of the model's own distribution
        (SamplingParams(temperature=0.7, top_k=20), Largest),
        (SamplingParams(temperature=0.7, top_k=MAX_LARGEST + 1), np.ndarray),
        (SamplingParams(temperature=0.7), np.ndarray),  # any token may be drawn
        (SamplingParams(temperature=0.7, min_p=0.05), Largest),
        (SamplingParams(temperature=0.7, top_p=0.9), Largest),
        (SamplingParams(temperature=2.0, top_p=0.999), np.ndarray),  # more tokens than are given
        (SamplingParams(temperature=1e-300, top_p=0.9), np.ndarray),  # a sum that is no number
    ],
)
def test_who_is_given_less_than_a_row(params: SamplingParams, part: type) -> None:
    row = (np.random.default_rng(3).normal(size=VOCABULARY) * 4).astype(np.float32)
    assert isinstance(given(row, params), part)


def test_a_sum_that_may_decide_either_way_is_left_to_the_whole_row() -> None:
    # Given two tokens of probability 1/2 each, as nearly as a sum of a device tells: is one of them a half?
    row = np.full(VOCABULARY, -100, np.float32)
    row[[9, 4]] = 1.0
    assert isinstance(given(row, SamplingParams(top_p=0.5)), np.ndarray)
    assert isinstance(given(row, SamplingParams(top_p=0.6)), Largest)


def test_logits_that_float64_cannot_tell_apart_are_left_to_the_whole_row() -> None:
    # Given as many tiny logits as are kept, the larger ones behind a smaller one that ties with them beside the best
    row = np.full(VOCABULARY, -100, np.float32)
    row[0], row[1], row[2] = 5, 1e-30, 2e-30
    params = SamplingParams(top_k=2, temperature=2.0)
    assert isinstance(given(row, params), np.ndarray)
    assert {sample(Draw(row, params, 1, position)).token for position in range(100)} == {0, 1}

"""Tokens drawn by the native sampler are those that the NumPy sampler draws, bit by bit, on every instruction set."""

import dataclasses

import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay.errors import ExecutionError
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_worker.execution.selection import Largest
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.kernels.sampled_rows import SAMPLED_ROW
from blockrelay_worker.sampling.row_sampler import sampler_of
from blockrelay_worker.sampling.sampler import NO_TOKEN, Draw, need_of, sample
from tests.support.worker.kernel_variants import NATIVE

pytestmark = pytest.mark.skipif(not NATIVE, reason="no kernels were compiled here")

SAMPLERS = {f"{isa}-{threads}": sampler_of(kernels) for (isa, threads), kernels in NATIVE.items()}
BY_NUMPY = sampler_of(load_kernels(1, isa="reference"))
SIZES = [1, 2, 7, 8, 31, 32, 33, 64, 100, 257, 1000, 1025, 4096, 20_000]


def assert_as_numpy(draws: list[Draw]) -> None:
    """Asserts that all native samplers give what the NumPy sampler gives for each draw alone."""
    expected = [sample(draw) for draw in draws]
    for name, sampler in SAMPLERS.items():
        assert sampler(draws) == expected, name


def _logits(rng: np.random.Generator, size: int) -> NDArray[np.float32]:
    """A row that is flat, steep, full of ties or constant."""
    row = rng.standard_normal(size) * rng.choice([0.1, 1.0, 5.0, 30.0, 1e5])
    shaped = [row, np.round(row), np.full(size, row[0]), np.where(rng.random(size) < 0.5, row, row[0])]
    return shaped[rng.integers(len(shaped))].astype(np.float32)


def _params(rng: np.random.Generator) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.choice([0, 1, 0.6, 2, 0.01, 1e-300, 1.5])),
        top_k=int(rng.choice([0, 0, 0, 1, 2, 40, 1000, 2**31 - 1])),
        top_p=float(rng.choice([1, 1, 0.95, 0.5, 0.999999, 1e-9])),
        min_p=float(rng.choice([0, 0, 0, 0.1, 1, 0.001])),
        logprobs=[None, None, 0, 5, 20][rng.integers(5)],
    )


def _draw(rng: np.random.Generator, size: int) -> Draw:
    return Draw(_logits(rng, size), _params(rng), int(rng.integers(-(2**63), 2**63)), int(rng.integers(10**6)))


@pytest.mark.parametrize("size", SIZES)
def test_a_step_of_rows_gives_what_each_row_gives_alone(size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(4):
        draws = [_draw(rng, size) for _ in range(rng.integers(1, 17))]
        assert_as_numpy(draws)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99, 0.9999999])
def test_a_nucleus_of_thousands_ends_at_the_same_token(top_p: float) -> None:
    rng = np.random.default_rng(7)
    for scale in (0.0, 0.3, 1.0, 2.0):
        row = (rng.standard_normal(20_000) * scale).astype(np.float32)
        for min_p in (0.0, 0.2):
            draws = [Draw(row, SamplingParams(top_p=top_p, min_p=min_p), 5, position) for position in range(6)]
            assert_as_numpy(draws)


def test_a_share_that_a_sum_just_reaches_is_decided_by_the_sum_in_order() -> None:
    # Equal weights: the nucleus ends where the running sum equals the share of the total to the last bit.
    row = np.zeros(4096, np.float32)
    shares = [k / 4096 for k in (1024, 1025, 2048, 3000, 4095)]
    shares += [float(np.nextafter(share, to)) for share in shares for to in (0, 1)]
    draws = [Draw(row, SamplingParams(top_p=share), 1, at) for share in shares for at in range(20)]
    assert_as_numpy(draws)


def test_the_largest_logits_of_a_device_serve_as_the_whole_row() -> None:
    rng = np.random.default_rng(2)
    ids = np.sort(rng.choice(30_000, 200, replace=False))
    row = Largest(ids, (rng.standard_normal(200) * 4).astype(np.float32), 700.0)
    greedy = Largest(np.array([17]), np.zeros(1, np.float32))
    draws = [Draw(greedy, SamplingParams(temperature=0), 0, 0)]
    for params in (SamplingParams(top_p=0.8), SamplingParams(top_k=20), SamplingParams(top_p=0.5, min_p=0.1)):
        assert need_of(params) is not None
        draws += [Draw(row, params, 3, position) for position in range(30)]
    assert_as_numpy(draws)


def test_changed_logits_and_a_mask_decide_the_draw_and_no_log_probability() -> None:
    rng = np.random.default_rng(3)
    draws: list[Draw] = []
    for size in (1, 33, 700):
        for _ in range(15):
            plain = _draw(rng, size)
            ids = rng.choice(size, min(size, 5), replace=False)
            changes = (ids, rng.standard_normal(ids.size) * 50) if rng.random() < 0.6 else None
            allowed = rng.integers(0, 2**32, -(-size // 32), dtype=np.uint32)
            allowed[0] |= 1
            draws.append(dataclasses.replace(plain, changes=changes, allowed=allowed if rng.random() < 0.6 else None))
    assert_as_numpy(draws)


def test_only_an_allowed_token_comes_and_a_row_without_any_gives_none() -> None:
    row, params = np.arange(40, dtype=np.float32), SamplingParams(temperature=0, logprobs=1)
    only_3 = Draw(row, params, 0, 0, allowed=np.array([1 << 3, 0], np.uint32))
    for sampler in (*SAMPLERS.values(), BY_NUMPY):
        (found,) = sampler([only_3])
        assert (found.token, found.top[0][0]) == (3, 39)
        none = dataclasses.replace(only_3, allowed=np.zeros(2, np.uint32))
        assert [one.token for one in sampler([only_3, none, only_3])] == [3, NO_TOKEN, 3]


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 2**31 - 1, 2**63])
def test_all_seeds_and_positions_give_the_random_number_of_the_definition(seed: int, position: int) -> None:
    row = np.linspace(0, 3, 500, dtype=np.float32)
    assert_as_numpy([Draw(row, SamplingParams(temperature=temperature), seed, position) for temperature in (1, 2)])


def test_rows_that_a_caller_let_through_although_they_are_not_finite_harm_nothing() -> None:
    kernels = next(iter(NATIVE.values()))
    for value in (np.nan, np.inf):
        for temperature in (0.0, 1.0):
            row = np.zeros(70, np.float32)
            row[0] = value
            (found,) = sampler_of(kernels)([Draw(row, SamplingParams(temperature=temperature), 0, 0)])
            assert found.token == NO_TOKEN


def test_no_rows_give_no_tokens() -> None:
    for sampler in (*SAMPLERS.values(), BY_NUMPY):
        assert sampler([]) == []


def test_the_numpy_kernels_draw_by_numpy() -> None:
    draw = Draw(np.array([1, 5, 2], np.float32), SamplingParams(temperature=0, logprobs=0), 0, 0)
    assert BY_NUMPY([draw, draw]) == [sample(draw)] * 2


def test_wrong_arrays_and_indices_are_refused() -> None:
    kernels = next(iter(NATIVE.values()))
    row = np.zeros(4, np.float32)
    with pytest.raises(ExecutionError, match="rows"):
        kernels.sample(np.zeros(1, SAMPLED_ROW.descr[:-1]), np.empty((1, 0), np.int64), np.empty((1, 0)))
    with pytest.raises(ExecutionError, match="ids"):
        kernels.sample(np.zeros(1, SAMPLED_ROW), np.empty((2, 0), np.int64), np.empty((1, 0)))
    with pytest.raises(ExecutionError, match="ids"):
        kernels.sample(np.zeros(1, SAMPLED_ROW), np.empty(1, np.int64), np.empty((1, 0)))
    changes = (np.array([4]), np.zeros(1))
    with pytest.raises(ExecutionError):
        sampler_of(kernels)([Draw(row, SamplingParams(), 0, 0, changes=changes)])

"""Rotary embedding and attention give the bits of the NumPy kernels in every native variant and thread count."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockrelay_worker.kernels import PAGE
from tests.support.worker.kernel_cases import Chunk, chunks, floats
from tests.support.worker.kernel_variants import NATIVE, assert_same

pytestmark = pytest.mark.skipif(not NATIVE, reason="no native kernels were built (no C++ compiler at install)")


@given(chunks())
@settings(max_examples=30, deadline=None)
def test_rotary_and_attention_give_the_bits_of_the_reference(chunk: Chunk) -> None:
    assert_same(chunk, chunk.run)


@pytest.mark.kernels
@given(chunks())
@settings(max_examples=200, deadline=None)
def test_rotary_and_attention_of_more_chunks_give_the_bits_of_the_reference(chunk: Chunk) -> None:
    assert_same(chunk, chunk.run)


@given(chunks(max_rows=20, max_first=20), st.sampled_from([np.nan, np.inf, -np.inf, 1e30]), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_rows_that_are_not_finite_give_the_bits_of_the_reference(chunk: Chunk, value: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    chunk.qkv[rng.integers(len(chunk.qkv)), rng.integers(chunk.qkv.shape[1])] = value
    assert_same(chunk, chunk.run)


@pytest.mark.kernels
@pytest.mark.parametrize(("rows_", "first", "dim", "group"), [(512, 0, 64, 4), (300, 700, 24, 3), (1, 2000, 128, 8)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_long_segments_give_the_bits_of_the_reference(
    rows_: int, first: int, dim: int, group: int, dtype: type[np.floating[Any]]
) -> None:
    rng = np.random.default_rng(0)
    pages = -(-(first + rows_) // PAGE)
    k_pages = floats(rng, pages, 2, dim, PAGE, spread=0).astype(dtype)
    v_pages = floats(rng, pages, 2, PAGE, dim, spread=0).astype(dtype)
    last = (first + rows_) % PAGE
    if last:
        k_pages[-1, :, :, last:] = v_pages[-1, :, last:] = np.nan
    q = floats(rng, rows_, 2 * group, dim, spread=0)
    table = np.arange(pages, dtype=np.int32)[None]
    segments = np.array([(0, rows_, first)], np.int64)
    assert_same(dim, lambda kernels: (kernels.attention(q, k_pages, v_pages, table, segments),))


@pytest.mark.kernels
@pytest.mark.parametrize("group", range(1, 9))
def test_every_head_dim_gives_the_bits_of_the_reference(group: int) -> None:
    # Given two segments around a page boundary, every slot beyond them filled with what another request left there
    for dim, dtype in product(range(8, 257, 8), (np.float16, np.float32)):
        rng = np.random.default_rng(dim)
        k_pages: Any = floats(rng, 3, 1, dim, PAGE, spread=0).astype(dtype)
        v_pages: Any = floats(rng, 3, 1, PAGE, dim, spread=0).astype(dtype)
        k_pages[:, :, :, 7:] *= 100
        q = floats(rng, 6, group, dim, spread=0)
        table = np.array([[2, 1], [0, -1]], np.int32)
        segments = np.array([(0, 3, 14), (3, 3, 2)], np.int64)
        assert_same((dim, dtype), lambda kernels: (kernels.attention(q, k_pages, v_pages, table, segments),))  # noqa: B023


def test_every_place_in_a_page_gives_the_bits_of_the_reference() -> None:
    # Given segments of every length up to two pages and one, from every slot of a page on, in one batch
    rng = np.random.default_rng(1)
    shapes = [(length, first) for first in range(17) for length in (1, 2, 15, 16, 17, 31, 32, 33)]
    rows_ = sum(length for length, _ in shapes)
    begins = np.cumsum([0, *(length for length, _ in shapes)])[:-1]
    segments = np.array([(b, n, f) for b, (n, f) in zip(begins, shapes, strict=True)], np.int64)
    table = np.full((len(shapes), 5), -1, np.int32)
    for line, (length, first) in zip(table, shapes, strict=True):
        needed = -(-(first + length) // PAGE)
        line[:needed] = rng.choice(40, needed, replace=False)
    k_pages = floats(rng, 40, 1, 24, PAGE, spread=0).astype(np.float16)
    v_pages = floats(rng, 40, 1, PAGE, 24, spread=1).astype(np.float16)
    q = floats(rng, rows_, 3, 24, spread=0)
    assert_same("places", lambda kernels: (kernels.attention(q, k_pages, v_pages, table, segments),))


def _one_kv_head(shapes: list[tuple[int, int]], group: int) -> None:
    """Compares attention of segments of (rows, first position), which read one key/value head of size 24."""
    rng = np.random.default_rng(2)
    begins = np.cumsum([0, *(length for length, _ in shapes)])[:-1]
    segments = np.array([(b, n, f) for b, (n, f) in zip(begins, shapes, strict=True)], np.int64)
    table = np.array([rng.permutation(400) for _ in shapes], np.int32)
    k_pages = floats(rng, 400, 1, 24, PAGE, spread=0).astype(np.float16)
    v_pages = floats(rng, 400, 1, PAGE, 24, spread=1).astype(np.float16)
    q = floats(rng, sum(length for length, _ in shapes), group, 24, spread=0)
    assert_same(shapes, lambda kernels: (kernels.attention(q, k_pages, v_pages, table, segments),))


@pytest.mark.parametrize("group", [1, 3])
def test_every_place_around_the_end_of_a_span_gives_the_bits_of_the_reference(group: int) -> None:
    shapes = [(length, first) for first in (254, 255, 256, 257, 511) for length in (1, 2, 18)]
    _one_kv_head([*shapes, (40, 240), (200, 300)], group)


@pytest.mark.parametrize("length", [1, 2, 5, 40])
def test_threads_that_share_one_long_request_give_the_bits_of_the_reference(length: int) -> None:
    # Given a request whose only key/value head is nearly all of the work, so that it is cut at its spans
    _one_kv_head([(1, 20), (length, 6000), (3, 250)], 4)

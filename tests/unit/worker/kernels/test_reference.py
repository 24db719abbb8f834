"""The NumPy kernels, the oracle of the native ones: that they compute the right thing, and the laws they keep."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from blockrelay.errors import ExecutionError
from blockrelay_worker.kernels import PAGE, load_kernels
from tests.support.worker.kernel_cases import NOT_FINITE, Chunk, Rows, chunks, floats, rows, same_bits

KERNELS = load_kernels(1, isa="reference")


def _softmax_attention(chunk: Chunk, q: NDArray[Any], k_pages: NDArray[Any], v_pages: NDArray[Any]) -> NDArray[Any]:
    """Attention as a textbook writes it, in float64."""
    heads, dim = chunk.query_heads, k_pages.shape[2]
    group = heads // k_pages.shape[1]
    segment = np.repeat(np.arange(len(chunk.segments)), chunk.segments[:, 1])
    out = np.empty((len(q), heads * dim))
    for row, position in enumerate(chunk.positions.tolist()):
        seen = np.arange(position + 1)
        page, slot = chunk.page_table[segment[row], seen // PAGE], seen % PAGE
        for head in range(heads):
            k = k_pages[page, head // group, :, slot].astype(np.float64)
            v = v_pages[page, head // group, slot].astype(np.float64)
            s = k @ q[row, head].astype(np.float64) / math.sqrt(dim)
            p = np.exp(s - s.max())
            out[row, head * dim : (head + 1) * dim] = p @ v / p.sum()
    return out


@given(chunks(max_rows=8, max_first=40, tame=True))
@settings(max_examples=15, deadline=None)
def test_a_row_attends_to_the_keys_up_to_its_own_position(chunk: Chunk) -> None:
    q, out, k_pages, v_pages = chunk.run(KERNELS)
    textbook = _softmax_attention(chunk, q, k_pages, v_pages)
    np.testing.assert_allclose(out, textbook, rtol=1e-3, atol=1e-4 * np.abs(textbook).max())


def test_rotary_turns_pairs_half_a_head_apart_by_the_angle_of_the_position() -> None:
    # Given one query head, one key head and one value head of 8, scaled by 2, and angles of position 3
    qkv = np.linspace(0, 3, 24, dtype=np.float32)[None]
    angle = 3.0 * 10.0 ** -np.arange(4)
    table = np.zeros((4, 4), np.float32), np.zeros((4, 4), np.float32)
    table[0][3], table[1][3] = np.cos(angle), np.sin(angle)
    k_pages = np.full((2, 1, 8, PAGE), np.nan, np.float16)
    v_pages = np.full((2, 1, PAGE, 8), np.nan, np.float16)

    # When the row goes to slot 5 of page 1
    one = np.ones(1, np.int32)
    q = KERNELS.rotary_append(
        qkv, np.full(1, 2, np.float32), None, None, None, 1e-6, *table, 3 * one, one, 5 * one, k_pages, v_pages
    )

    # Then query and key are turned, the value is only scaled, and no other slot is written
    def turned(x: NDArray[Any]) -> NDArray[Any]:
        first, second = 2 * x[:4], 2 * x[4:]
        return np.concatenate(
            [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)]
        )

    np.testing.assert_allclose(q[0, 0], turned(qkv[0, :8]), rtol=1e-6)
    np.testing.assert_allclose(k_pages[1, 0, :, 5], turned(qkv[0, 8:16]), rtol=1e-3)
    np.testing.assert_array_equal(v_pages[1, 0, 5], (2 * qkv[0, 16:]).astype(np.float16))
    assert np.isfinite(k_pages).sum() == np.isfinite(v_pages).sum() == 8


def test_keys_and_values_saturate_and_what_is_not_finite_stays_visible() -> None:
    values = np.array([65503.0, 65519.0, 65520.0, 1e9, -1e9, np.inf, -np.inf, np.nan], np.float32)
    qkv = np.concatenate([np.zeros(16, np.float32), values])[None]
    k_pages = np.zeros((1, 1, 8, PAGE), np.float16)
    v_pages = np.zeros((1, 1, PAGE, 8), np.float16)
    zero, table = np.zeros(1, np.int32), np.ones((1, 4), np.float32)
    KERNELS.rotary_append(qkv, None, None, None, None, 1e-6, table, table, zero, zero, zero, k_pages, v_pages)
    assert v_pages[0, 0, 0, :5].tolist() == [65504, 65504, 65504, 65504, -65504]
    assert v_pages[0, 0, 0, 5:].view(np.uint16).tolist() == [0x7E00] * 3


@given(rows(finite=True))
def test_quantised_rows_are_within_half_a_step(case: Rows) -> None:
    u, scale = KERNELS.quantise(case.x)
    assert u.min(initial=255) >= 1
    restored = (u.astype(np.float64) - 128) * scale[:, None].astype(np.float64)
    assert (np.abs(restored - case.x) <= 0.5001 * scale[:, None].astype(np.float64)).all()


def test_groups_are_quantised_as_rows_of_their_own_are() -> None:
    x = floats(np.random.default_rng(4), 6, 96)
    u, scale = KERNELS.quantise(x, group=32)
    u_alone, scale_alone = KERNELS.quantise(x.reshape(18, 32))
    assert same_bits(u.reshape(18, 32), u_alone) and same_bits(scale.reshape(18), scale_alone)


def test_a_value_that_is_not_finite_shows_in_every_group_of_its_row() -> None:
    x = floats(np.random.default_rng(4), 3, 96)
    finite = KERNELS.quantise(x, group=32)
    x[1, 40] = np.inf
    u, scale = KERNELS.quantise(x, group=32)
    assert (scale.view(np.uint32)[1] == 0x7FC00000).all() and (u[1] == 128).all()
    assert same_bits(u[::2], finite[0][::2]) and same_bits(scale[::2], finite[1][::2])


def test_norm_and_swiglu_are_the_formulas_of_the_papers() -> None:
    rng = np.random.default_rng(0)
    x, weight = floats(rng, 5, 100), floats(rng, 100, spread=0)
    wide = x.astype(np.float64)
    rms = np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(KERNELS.norm(x, weight, 1e-5), wide / rms * weight, rtol=1e-5)
    gate, up = wide[:, :50], wide[:, 50:]
    with np.errstate(over="ignore"):
        expected = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(KERNELS.swiglu(x), expected, rtol=1e-5, atol=1e-30)


@given(rows(max_rows=6), st.data())
def test_a_row_that_is_not_finite_spoils_only_itself(case: Rows, data: st.DataObject) -> None:
    count, columns = case.x.shape
    if count == 0:
        return
    row, column = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, columns - 1))
    spoilt = case.x.copy()
    spoilt[row, column] = data.draw(st.sampled_from(NOT_FINITE))
    others = np.arange(count) != row
    for name in ("quantise", "norm_quantise"):
        kernel: Any = getattr(KERNELS, name)
        more = () if name == "quantise" else (case.weight, 1e-5)
        u, scale = kernel(case.x, *more)
        u_spoilt, scale_spoilt = kernel(spoilt, *more)
        assert scale_spoilt.view(np.uint32)[row] == 0x7FC00000
        assert (u_spoilt[row] == 128).all()
        assert same_bits(u[others], u_spoilt[others]) and same_bits(scale[others], scale_spoilt[others])


def test_a_norm_that_overflows_is_not_finite() -> None:
    x = np.array([[3e38, 1.0]], np.float32)
    assert np.isnan(KERNELS.norm(x, np.ones(2, np.float32), 1e-5)).all()


@given(chunks(max_rows=30, max_first=40), st.data())
@settings(max_examples=15, deadline=None)
def test_no_bit_depends_on_how_a_segment_is_cut_or_on_its_batch(chunk: Chunk, data: st.DataObject) -> None:
    _, together, k_together, v_together = chunk.run(KERNELS)
    alone = np.empty_like(together)
    k_pages, v_pages = chunk.k_pages.copy(), chunk.v_pages.copy()
    for index, (first_row, length, first) in enumerate(chunk.segments.tolist()):
        cut = data.draw(st.integers(0, length))
        for begin, end in ((0, cut), (cut, length)):
            part = slice(first_row + begin, first_row + end)
            positions = chunk.positions[part]
            q = KERNELS.rotary_append(
                chunk.qkv[part], None if chunk.row_scale is None else chunk.row_scale[part], chunk.bias,
                chunk.norm_q, chunk.norm_k, 1e-6, chunk.cos, chunk.sin, positions, chunk.page[part],
                positions % PAGE, k_pages, v_pages,
            )  # fmt: skip
            segments = np.array([(0, end - begin, first + begin)], np.int64)
            KERNELS.attention(q, k_pages, v_pages, chunk.page_table[index : index + 1], segments, out=alone[part])
    assert same_bits(alone, together)
    assert same_bits(k_pages, k_together) and same_bits(v_pages, v_together)


@pytest.mark.parametrize("first_position", [-1, 33])
def test_segments_beyond_their_pages_are_refused(first_position: int) -> None:
    q = np.zeros((1, 1, 8), np.float32)
    pages = np.zeros((2, 1, 8, PAGE), np.float32)
    table = np.arange(2, dtype=np.int32)[None]
    segments = np.array([(0, 1, first_position)], np.int64)
    with pytest.raises(ExecutionError, match=r"segment|pages"):
        KERNELS.attention(q, pages, pages.reshape(2, 1, PAGE, 8), table, segments)

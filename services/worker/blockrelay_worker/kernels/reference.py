"""Kernels in NumPy: the reference for the native ones, and the slow fallback where none were compiled at install."""

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from blockrelay_worker.kernels import arguments, float32
from blockrelay_worker.kernels.interface import F16, F32, I8, I32, I64, U8, Matmul, Pages, Program
from blockrelay_worker.kernels.specification import FLOAT16_MAX, PAGE

_LOWEST = np.float32(-1e30)
_FLOAT16_MAX = np.float32(FLOAT16_MAX)


@final
class ReferenceKernels:
    """`Kernels` as `specification` defines them, vectorised over rows and heads.

    One thread, about 100 times slower than the native ones. It has no matmul and records nothing: `matmul`,
    `group_matmul` and `record` raise AssertionError.
    """

    @property
    def isa(self) -> str:
        return "reference"

    def norm_quantise(
        self, x: F32, weight: F32, eps: float, *, u: U8 | None = None, scale: F32 | None = None
    ) -> tuple[U8, F32]:
        rows, hidden = arguments.matrix_shape("x", x)
        arguments.check("weight", weight, arguments.FLOAT32, (hidden,))
        u, scale = arguments.quantised_out(u, scale, rows, hidden)
        with np.errstate(all="ignore"):
            float32.quantise(float32.norm(x, weight, eps), u, scale)
        return u, scale

    def norm(self, x: F32, weight: F32, eps: float, *, out: F32 | None = None) -> F32:
        rows, hidden = arguments.matrix_shape("x", x)
        arguments.check("weight", weight, arguments.FLOAT32, (hidden,))
        out = arguments.float32_out("out", out, (rows, hidden))
        with np.errstate(all="ignore"):
            out[:] = float32.norm(x, weight, eps)
        return out

    def quantise(self, x: F32, *, u: U8 | None = None, scale: F32 | None = None) -> tuple[U8, F32]:
        rows, columns = arguments.matrix_shape("x", x)
        u, scale = arguments.quantised_out(u, scale, rows, columns)
        with np.errstate(all="ignore"):
            float32.quantise(x, u, scale)
        return u, scale

    def rotary_append(
        self,
        qkv: F32,
        row_scale: F32 | None,
        bias: F32 | None,
        norm_q: F32 | None,
        norm_k: F32 | None,
        eps: float,
        cos: F32,
        sin: F32,
        positions: I32,
        page: I32,
        slot: I32,
        k_pages: Pages,
        v_pages: Pages,
        *,
        out: F32 | None = None,
    ) -> F32:
        shape = arguments.rotary_shape(
            qkv, row_scale, bias, norm_q, norm_k, cos, sin, positions, page, slot, k_pages, v_pages
        )
        arguments.check_range("positions", positions, cos.shape[0])
        arguments.check_range("page", page, shape.pages)
        arguments.check_range("slot", slot, PAGE)
        heads = (shape.query_heads, shape.query_heads + shape.kv_heads)
        out = arguments.float32_out("out", out, (shape.rows, shape.query_heads, shape.head_dim))
        with np.errstate(all="ignore"):
            x = qkv if row_scale is None else qkv * row_scale[:, None]
            x = x if bias is None else x + bias
            q, k, v = np.split(x.reshape(shape.rows, heads[1] + shape.kv_heads, shape.head_dim), heads, axis=1)
            if norm_q is not None and norm_k is not None:
                q, k = float32.norm(q, norm_q, eps), float32.norm(k, norm_k, eps)
            c, s = cos[positions][:, None], sin[positions][:, None]
            out[:] = _rotate(q, c, s)
            k_pages[page, :, :, slot] = _stored(_rotate(k, c, s), k_pages.dtype)
            v_pages[page, :, slot] = _stored(v, v_pages.dtype)
        return out

    def attention(
        self, q: F32, k_pages: Pages, v_pages: Pages, page_table: I32, segments: I64, *, out: F32 | None = None
    ) -> F32:
        shape = arguments.attention_shape(q, k_pages, v_pages, page_table, segments)
        arguments.check_segments(segments, page_table, shape)
        out = arguments.float32_out("out", out, (shape.rows, shape.query_heads * shape.head_dim))
        with np.errstate(all="ignore"):
            out[:] = _attention(q, k_pages, v_pages, page_table, segments, shape)
        return out

    def add_scaled(self, x: F32, y: F32, row_scale: F32 | None) -> None:
        rows, columns = arguments.matrix_shape("x", x)
        arguments.check("y", y, arguments.FLOAT32, (rows, columns))
        if row_scale is not None:
            arguments.check("row_scale", row_scale, arguments.FLOAT32, (rows,))
        with np.errstate(all="ignore"):
            x += y if row_scale is None else y * row_scale[:, None]

    def scale_rows(self, x: F32, row_scale: F32) -> None:
        rows, _ = arguments.matrix_shape("x", x)
        arguments.check("row_scale", row_scale, arguments.FLOAT32, (rows,))
        with np.errstate(all="ignore"):
            x *= row_scale[:, None]

    def swiglu_quantise(
        self, gate_up: F32, row_scale: F32, *, u: U8 | None = None, scale: F32 | None = None
    ) -> tuple[U8, F32]:
        rows, columns = arguments.gate_up_shape(gate_up)
        arguments.check("row_scale", row_scale, arguments.FLOAT32, (rows,))
        u, scale = arguments.quantised_out(u, scale, rows, columns)
        with np.errstate(all="ignore"):
            scaled = gate_up * row_scale[:, None]
            float32.quantise(float32.swiglu(scaled[:, :columns], scaled[:, columns:]), u, scale)
        return u, scale

    def swiglu(self, gate_up: F32, *, out: F32 | None = None) -> F32:
        rows, columns = arguments.gate_up_shape(gate_up)
        out = arguments.float32_out("out", out, (rows, columns))
        with np.errstate(all="ignore"):
            out[:] = float32.swiglu(gate_up[:, :columns], gate_up[:, columns:])
        return out

    @property
    def has_matmul(self) -> bool:
        return False

    def matmul(self, q: I8, scale: F32) -> Matmul:
        raise AssertionError("the reference kernels have no matmul: `exact_linears` is its reference")

    @property
    def has_group_matmul(self) -> bool:
        return False

    def group_matmul(self, q4: U8, gs: F16, scale: F32) -> Matmul:
        raise AssertionError("the reference kernels have no matmul: `exact_linears` is its reference")

    @property
    def records(self) -> bool:
        return False

    def record(self, parts: Sequence[Callable[[], None]]) -> Program:
        raise AssertionError("the reference kernels are called directly")


def _rotate(x: F32, cos: F32, sin: F32) -> F32:
    """Returns x [R,h,D] rotated by cos and sin [R,1,D/2]."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([float32.fma(first, cos, -(second * sin)), float32.fma(second, cos, first * sin)], axis=-1)


def _stored(x: F32, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns x in the dtype of a page: as it is for float32, saturated and rounded for float16."""
    if dtype == np.float32:
        return x
    saturated = np.where(np.isfinite(x), np.clip(x, -_FLOAT16_MAX, _FLOAT16_MAX), np.float32(np.nan))
    return saturated.astype(np.float16)


def _attention(
    q: F32, k_pages: Pages, v_pages: Pages, page_table: I32, segments: I64, shape: arguments.HeadShape
) -> F32:
    """Returns attention [R,Hq*D], all rows at once, page after page; rows that end before a page skip it."""
    rows, kv_heads, dim = shape.rows, shape.kv_heads, shape.head_dim
    group = shape.query_heads // kv_heads
    segment = np.repeat(np.arange(len(segments)), segments[:, 1])  # [R]
    limit = (segments[segment, 2] - segments[segment, 0]) + np.arange(rows) + 1  # [R] visible keys
    scaled = q.reshape(rows, kv_heads, group, dim) * (np.float32(1) / np.sqrt(np.float32(dim)))
    highest = np.full((rows, kv_heads, group), _LOWEST)
    total = np.zeros((rows, kv_heads, group), np.float32)
    acc = np.zeros((rows, kv_heads, group, dim), np.float32)
    for index in range(-(-int(limit.max(initial=0)) // PAGE)):
        active = np.flatnonzero(limit > index * PAGE)  # [A]
        seen, of_row = np.unique(segment[active], return_inverse=True)
        k = k_pages[page_table[seen, index]].astype(np.float64)  # [seen, Hkv, D, 16]
        v = v_pages[page_table[seen, index]].astype(np.float64)  # [seen, Hkv, 16, D]
        visible = np.arange(PAGE) < (limit[active] - index * PAGE)[:, None, None, None]  # [A,1,1,16]

        s = np.zeros((len(active), kv_heads, group, PAGE), np.float32)
        query = scaled[active].astype(np.float64)
        for d in range(dim):
            s = float32.fma(query[..., d, None], k[:, :, d][of_row, :, None], s)
        old = highest[active]
        new = np.where(visible & (s > old[..., None]), s, old[..., None]).max(axis=-1)
        correction = float32.exp(old - new)
        p = np.where(visible, float32.exp(s - new[..., None]), np.float32(0))
        page_sum = p[..., 0]
        for t in range(1, PAGE):
            page_sum = page_sum + p[..., t]
        total[active] = total[active] * correction + page_sum
        highest[active] = new
        a = acc[active] * correction[..., None]
        for t in range(PAGE):
            a = np.where(visible[..., t, None], float32.fma(p[..., t, None], v[:, :, t][of_row, :, None], a), a)
        acc[active] = a
    inverse: F32 = np.divide(np.float32(1), total, dtype=np.float32)
    return (acc * inverse[..., None]).reshape(rows, shape.query_heads * dim)

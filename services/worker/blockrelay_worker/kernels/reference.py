"""Kernels in NumPy: the reference for the native ones, and the slow fallback where none were compiled at install."""

from collections.abc import Callable
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from blockrelay_worker.kernels import float32
from blockrelay_worker.kernels.arguments import F32, I32, I64, U8, Pages
from blockrelay_worker.kernels.interface import IndexCheck, Kernels, Value, no_indices
from blockrelay_worker.kernels.specification import FLOAT16_MAX, PAGE, SPAN_PAGES

_LOWEST = np.float32(-1e30)
_FLOAT16_MAX = np.float32(FLOAT16_MAX)


@final
class ReferenceKernels(Kernels):
    """`Kernels` as `specification` defines them, vectorised over rows and heads.

    One thread, about 100 times slower than the native ones. It has no matmul (`exact_linears` is its reference) and
    records nothing.
    """

    isa = "reference"

    def call(self, name: str, *values: Value, check_indices: IndexCheck = no_indices) -> None:
        """Computes what the native function of this name does. Raises ExecutionError for an index out of range."""
        check_indices()
        with np.errstate(all="ignore"):
            _FUNCTIONS[name](*values)


# The functions of kernels.h. Sizes come last, and are not needed where the arrays have them.


def _norm(x: F32, weight: F32, eps: float, out: F32, *_: int) -> None:
    out[:] = float32.norm(x, weight, eps)


def _norm_quantise(x: F32, weight: F32, eps: float, u: U8, scale: F32, _rows: int, _columns: int, group: int) -> None:
    float32.quantise(float32.norm(x, weight, eps), u, scale, group)


def _quantise(x: F32, u: U8, scale: F32, _rows: int, _columns: int, hadamard: int, group: int) -> None:
    float32.quantise(float32.hadamard(x, hadamard) if hadamard else x, u, scale, group)


def _add_scaled(x: F32, y: F32, row_scale: F32 | None, *_: int) -> None:
    x += y if row_scale is None else y * row_scale[:, None]


def _scale_rows(x: F32, row_scale: F32, *_: int) -> None:
    x *= row_scale[:, None]


def _swiglu(gate_up: F32, row_scale: F32 | None, out: F32, _rows: int, columns: int) -> None:
    scaled = gate_up if row_scale is None else gate_up * row_scale[:, None]
    out[:] = float32.swiglu(scaled[:, :columns], scaled[:, columns:])


def _swiglu_quantise(
    gate_up: F32, row_scale: F32 | None, u: U8, scale: F32, _rows: int, columns: int, hadamard: int, group: int
) -> None:
    scaled = gate_up if row_scale is None else gate_up * row_scale[:, None]
    y = float32.swiglu(scaled[:, :columns], scaled[:, columns:])
    float32.quantise(float32.hadamard(y, hadamard) if hadamard else y, u, scale, group)


def _rotary_append(
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
    out: F32,
    *_: int,
) -> None:
    rows, query_heads, head_dim = out.shape
    x = qkv if row_scale is None else qkv * row_scale[:, None]
    x = x if bias is None else x + bias
    heads = (query_heads, query_heads + k_pages.shape[1])
    q, k, v = np.split(x.reshape(rows, heads[1] + k_pages.shape[1], head_dim), heads, axis=1)
    if norm_q is not None and norm_k is not None:
        q, k = float32.norm(q, norm_q, eps), float32.norm(k, norm_k, eps)
    c, s = cos[positions][:, None], sin[positions][:, None]
    out[:] = _rotate(q, c, s)
    k_pages[page, :, :, slot] = _stored(_rotate(k, c, s), k_pages.dtype)
    v_pages[page, :, slot] = _stored(v, v_pages.dtype)


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


def _attention(q: F32, k_pages: Pages, v_pages: Pages, page_table: I32, segments: I64, out: F32, *_: int) -> None:
    """Computes all rows at once, span after span; rows that end before a span skip it."""
    rows, query_heads, dim = q.shape
    kv_heads = k_pages.shape[1]
    group = query_heads // kv_heads
    segment = np.repeat(np.arange(len(segments)), segments[:, 1])  # [R]
    limit = (segments[segment, 2] - segments[segment, 0]) + np.arange(rows) + 1  # [R] visible keys
    scaled = q.reshape(rows, kv_heads, group, dim) * (np.float32(1) / np.sqrt(np.float32(dim)))
    whole = _no_keys(scaled.shape)
    for first_page in range(0, -(-int(limit.max(initial=0)) // PAGE), SPAN_PAGES):
        active = np.flatnonzero(limit > first_page * PAGE)  # [A]
        pages = page_table[segment[active], first_page : first_page + SPAN_PAGES]
        span = _span(scaled[active], k_pages, v_pages, pages, limit[active] - first_page * PAGE)
        combined = span if first_page == 0 else _combined(_Softmax(*(one[active] for one in whole)), span)
        for one, values in zip(whole, combined, strict=True):
            one[active] = values
    inverse: F32 = np.divide(np.float32(1), whole.total, dtype=np.float32)
    out[:] = (whole.acc * inverse[..., None]).reshape(out.shape)


class _Softmax(NamedTuple):
    """The softmax of query rows over some keys."""

    highest: F32
    """[R,Hkv,G] highest score."""
    total: F32
    """[R,Hkv,G] sum of exp(score - highest)."""
    acc: F32
    """[R,Hkv,G,D] sum of exp(score - highest) * value."""


def _no_keys(shape: tuple[int, ...]) -> _Softmax:
    """Returns the softmax over no keys of queries of a shape [R,Hkv,G,D]."""
    return _Softmax(np.full(shape[:-1], _LOWEST), np.zeros(shape[:-1], np.float32), np.zeros(shape, np.float32))


def _span(query: F32, k_pages: Pages, v_pages: Pages, pages: I32, limit: I64) -> _Softmax:
    """Returns the softmax of scaled queries [R,Hkv,G,D] over the pages [R,n] of a span.

    `limit` [R] is the number of keys that a row sees from the first of the span on, one at least.
    """
    scores: list[F32] = []
    wide = query.astype(np.float64)
    indices = range(-(-min(int(limit.max()), SPAN_PAGES * PAGE) // PAGE))
    visible = [np.arange(PAGE) < (limit - index * PAGE)[:, None, None, None] for index in indices]  # [R,1,1,16]
    # The distinct pages in each place of the span, and which of them each row [R] has there.
    of_page = [
        np.unique(np.where(limit > index * PAGE, pages[:, index], pages[:, 0]), return_inverse=True)
        for index in indices
    ]
    highest, _, acc = _no_keys(query.shape)
    for (distinct, of_row), seen in zip(of_page, visible, strict=True):
        k = k_pages[distinct].astype(np.float64)  # [pages,Hkv,D,16]
        s = np.zeros((*highest.shape, PAGE), np.float32)
        for d in range(query.shape[-1]):
            s = float32.fma(wide[..., d, None], k[:, :, d][of_row, :, None], s)
        highest = np.where(seen & (s > highest[..., None]), s, highest[..., None]).max(axis=-1)
        scores.append(s)
    sums = np.zeros((*highest.shape, PAGE), np.float32)
    for s, (distinct, of_row), seen in zip(scores, of_page, visible, strict=True):
        p = np.where(seen, float32.exp(s - highest[..., None]), np.float32(0))
        sums = sums + p
        v = v_pages[distinct].astype(np.float64)  # [pages,Hkv,16,D]
        for t in range(PAGE):
            acc = np.where(seen[..., t, None], float32.fma(p[..., t, None], v[:, :, t][of_row, :, None], acc), acc)
    total = sums[..., 0]
    for t in range(1, PAGE):
        total = total + sums[..., t]
    return _Softmax(highest, total, acc)


def _combined(before: _Softmax, span: _Softmax) -> _Softmax:
    """Returns the softmax over the keys of `before` and those of the span that follows them."""
    highest = np.maximum(before.highest, span.highest)
    old, new = float32.exp(before.highest - highest), float32.exp(span.highest - highest)
    return _Softmax(
        highest,
        float32.fma(span.total, new, before.total * old),
        float32.fma(span.acc, new[..., None], before.acc * old[..., None]),
    )


_FUNCTIONS: dict[str, Callable[..., None]] = {
    function.__name__.removeprefix("_"): function
    for function in (
        *(_norm, _norm_quantise, _quantise, _add_scaled, _scale_rows),
        *(_swiglu, _swiglu_quantise, _rotary_append, _attention),
    )
}

"""Random arguments for the kernels, drawn by hypothesis, and comparison of bits."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from blockrelay_worker.kernels import PAGE, Kernels

F32 = NDArray[np.float32]
NOT_FINITE = (np.nan, np.inf, -np.inf)


def same_bits(left: NDArray[Any], right: NDArray[Any]) -> bool:
    """Equal bytes; any NaN equals any other (payloads are not defined)."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype.kind != "f":
        return bool((left == right).all())
    width = f"u{left.dtype.itemsize}"
    return bool(((left.view(width) == right.view(width)) | (np.isnan(left) & np.isnan(right))).all())


def floats(rng: np.random.Generator, *shape: int, spread: int = 3) -> F32:
    """Normal numbers times a power of ten within 10**-spread..10**spread, the same for a row."""
    power = 10.0 ** rng.integers(-spread, spread + 1, size=(*shape[:1], *[1] * (len(shape) - 1)))
    return (rng.standard_normal(shape) * power).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Rows:
    """A matrix, some rows of which may not be finite or reach the ends of the float range."""

    x: F32
    weight: F32
    row_scale: F32
    other: F32

    def __repr__(self) -> str:
        return f"Rows{self.x.shape}"


@st.composite
def rows(draw: st.DrawFn, *, max_rows: int = 40, max_columns: int = 300, finite: bool = False) -> Rows:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count, columns = draw(st.integers(0, max_rows)), draw(st.integers(1, max_columns))
    x = floats(rng, count, columns, spread=draw(st.sampled_from([0, 3, 36])))
    if count and not finite:
        for value in draw(st.lists(st.sampled_from([*NOT_FINITE, 3e38, -0.0, 1e-45]), max_size=3)):
            x[rng.integers(count), rng.integers(columns)] = value
    return Rows(
        x=x,
        weight=floats(rng, columns),
        row_scale=floats(rng, count),
        other=floats(rng, count, columns),
    )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Chunk:
    """Rows of several segments on their way into attention; the pages hold the positions before the segments.

    Every slot that no token has filled, and every page of no segment, holds one number: NaN, infinity or a large one.
    """

    qkv: F32
    row_scale: F32 | None
    bias: F32 | None
    norm_q: F32 | None
    norm_k: F32 | None
    cos: F32
    sin: F32
    segments: NDArray[np.int64]
    page_table: NDArray[np.int32]
    k_pages: NDArray[Any]
    v_pages: NDArray[Any]
    query_heads: int

    def __repr__(self) -> str:
        return (
            f"Chunk(segments={self.segments.tolist()}, query_heads={self.query_heads}, "
            f"k_pages={self.k_pages.dtype}{self.k_pages.shape}, scaled={self.row_scale is not None}, "
            f"biased={self.bias is not None}, normed={self.norm_q is not None})"
        )

    @property
    def positions(self) -> NDArray[np.int32]:
        """[R]"""
        return np.concatenate([np.arange(first, first + n) for _, n, first in self.segments.tolist()]).astype(np.int32)

    @property
    def page(self) -> NDArray[np.int32]:
        """[R]"""
        segment = np.repeat(np.arange(len(self.segments)), self.segments[:, 1])
        return np.ascontiguousarray(self.page_table[segment, self.positions // PAGE])

    def run(self, kernels: Kernels) -> tuple[F32, F32, NDArray[Any], NDArray[Any]]:
        """(q, attention, k_pages, v_pages) after rotary_append and attention, on copies of the pages."""
        k_pages, v_pages = self.k_pages.copy(), self.v_pages.copy()
        q = kernels.rotary_append(
            self.qkv, self.row_scale, self.bias, self.norm_q, self.norm_k, 1e-6, self.cos, self.sin,
            self.positions, self.page, self.positions % PAGE, k_pages, v_pages,
        )  # fmt: skip
        return q, kernels.attention(q, k_pages, v_pages, self.page_table, self.segments), k_pages, v_pages


@st.composite
def chunks(
    draw: st.DrawFn,
    *,
    max_rows: int = 40,
    max_first: int = 70,
    tame: bool = False,
    dtypes: tuple[type[np.floating[Any]], ...] = (np.float16, np.float32),
) -> Chunk:
    """Any head_dim, group, norm and bias; segments that begin and end on and around page boundaries.

    `tame`: numbers near 1, so that rounding does not decide where the attention goes.
    """
    spread = 0 if tame else 3
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dim = 8 * draw(st.one_of(st.integers(1, 32), st.sampled_from([3, 8, 16])))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    near = st.integers(0, max_first) | st.sampled_from([0, 1, 15, 16, 17, 31, 32, 48])
    lengths = draw(st.lists(st.integers(1, max_rows) | st.sampled_from([1, 16]), min_size=1, max_size=4))
    segments = [(sum(lengths[:i]), n, min(draw(near), max_first)) for i, n in enumerate(lengths)]
    needed = [-(-(first + n) // PAGE) for _, n, first in segments]
    columns = max(needed) + draw(st.integers(0, 1))
    pages = sum(needed) + 2
    dtype = draw(st.sampled_from(dtypes))
    unused = draw(st.sampled_from([np.nan, np.inf, 3e4, -3e4]))  # NaN does not show in a maximum, and 3e4 does
    k_pages = np.full((pages, kv_heads, dim, PAGE), unused, dtype)
    v_pages = np.full((pages, kv_heads, PAGE, dim), unused, dtype)
    table = np.full((len(segments), columns), -1, np.int32)
    free = rng.permutation(pages).tolist()
    for index, (_, _, first) in enumerate(segments):
        table[index, : needed[index]] = [free.pop() for _ in range(needed[index])]
        known = np.arange(first)
        where = table[index, known // PAGE], known % PAGE
        k_pages[where[0], :, :, where[1]] = floats(rng, first, kv_heads, dim, spread=0)
        v_pages[where[0], :, where[1]] = floats(rng, first, kv_heads, dim, spread=1)
    width = (group + 2) * kv_heads * dim
    normed = draw(st.booleans())
    table_rows = max(first + n for _, n, first in segments)
    return Chunk(
        qkv=floats(rng, sum(lengths), width, spread=0 if tame else draw(st.sampled_from([0, 1, 5]))),
        row_scale=floats(rng, sum(lengths), spread=0) if draw(st.booleans()) else None,
        bias=floats(rng, width, spread=spread) if draw(st.booleans()) else None,
        norm_q=floats(rng, dim, spread=spread) if normed else None,
        norm_k=floats(rng, dim, spread=spread) if normed else None,
        cos=floats(rng, table_rows, dim // 2, spread=0),
        sin=floats(rng, table_rows, dim // 2, spread=0),
        segments=np.array(segments, np.int64),
        page_table=table,
        k_pages=k_pages,
        v_pages=v_pages,
        query_heads=group * kv_heads,
    )

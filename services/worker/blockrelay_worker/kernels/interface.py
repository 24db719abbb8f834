"""What the executor calls between matrix products: the `Kernels` protocol."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

F16: TypeAlias = NDArray[np.float16]
F32: TypeAlias = NDArray[np.float32]
U8: TypeAlias = NDArray[np.uint8]
I8: TypeAlias = NDArray[np.int8]
I32: TypeAlias = NDArray[np.int32]
I64: TypeAlias = NDArray[np.int64]
Pages: TypeAlias = NDArray[np.float16] | NDArray[np.float32]


class Product(Protocol):
    """One matrix product with quantised weights; bits as `linears` defines them."""

    def __call__(self, rows: U8, out: F32) -> None:
        """Multiply rows [R,K] (zero point 128) into out [R,N]."""
        ...


class Program(Protocol):
    """Calls of kernels and products, in parts."""

    def run(self, seconds: list[float]) -> None:
        """Make the calls. Appends to `seconds` what each part took; when one raises, those before it are in there."""
        ...


class Kernels(Protocol):
    """Float kernels on rows; their numbers are defined in `blockrelay_worker.kernels.specification`.

    R rows, H hidden, D head_dim (a multiple of 8, 256 at most), Hq query heads, Hkv key/value heads (Hq a multiple of
    Hkv), PAGE = 16. All arrays are C-contiguous with exactly the dtypes named here. Result buffers may be given (they
    are overwritten and returned) or are allocated; they must not overlap an argument. Wrong dtypes, shapes, layouts
    or indices raise `ExecutionError` before anything is written. Several threads may call one object, on
    disjoint buffers. R = 0 is legal. A row that is not finite has no effect on other rows.
    """

    @property
    def variant(self) -> str:
        """`avx512vnni`, `avx512`, `avx2`, `baseline` or `reference`: for logs, never for decisions about numbers."""
        ...

    def norm_quantise(
        self, x: F32, weight: F32, eps: float, *, u: U8 | None = None, scale: F32 | None = None
    ) -> tuple[U8, F32]:
        """quantise(norm(x)): x [R,H], weight [H] -> (u [R,H], scale [R])."""
        ...

    def norm(self, x: F32, weight: F32, eps: float, *, out: F32 | None = None) -> F32:
        """x [R,H], weight [H] -> [R,H]."""
        ...

    def quantise(self, x: F32, *, u: U8 | None = None, scale: F32 | None = None) -> tuple[U8, F32]:
        """x [R,H] -> (u [R,H], scale [R]) with x ~ (u - 128) * scale; a row that is not finite has scale NaN."""
        ...

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
        """Scales, biases, normalises and rotates the heads of each row; keys and values go to the row's page slot.

        qkv [R,(Hq+2*Hkv)*D] (all q heads, k heads, v heads), row_scale [R], bias [(Hq+2*Hkv)*D], norm_q and norm_k [D]
        (both or none), cos and sin [P,D/2] with positions [R] in 0..P-1, page [R] in 0..n-1 and slot [R] in 0..15.
        k_pages [n,Hkv,D,16] and v_pages [n,Hkv,16,D], both float16 or both float32, are written in place at (page,
        slot), no other slot is touched; no two rows may name the same slot. Returns q [R,Hq,D], not yet scaled.
        """
        ...

    def attention(
        self, q: F32, k_pages: Pages, v_pages: Pages, page_table: I32, segments: I64, *, out: F32 | None = None
    ) -> F32:
        """Causal attention of each row over the pages of its segment.

        q [R,Hq,D]; segments [S,3] = (first row, rows, first position), in row order and covering every row once;
        page_table [S,maxpages]: entry p of a segment's line is the page of its positions 16*p..16*p+15 (entries past
        the segment's last position are not read). The segment's own keys and values are already in their pages.
        Returns [R,Hq*D].
        """
        ...

    def add_scaled(self, x: F32, y: F32, row_scale: F32 | None) -> None:
        """x [R,H] += y [R,H] * row_scale [R], in place."""
        ...

    def scale_rows(self, x: F32, row_scale: F32) -> None:
        """x [R,H] *= row_scale [R], in place."""
        ...

    def swiglu_quantise(
        self, gate_up: F32, row_scale: F32, *, u: U8 | None = None, scale: F32 | None = None
    ) -> tuple[U8, F32]:
        """gate_up [R,2M] (gate columns, then up columns), row_scale [R] -> quantise(swiglu): (u [R,M], scale [R])."""
        ...

    def swiglu(self, gate_up: F32, *, out: F32 | None = None) -> F32:
        """gate_up [R,2M] -> [R,M]."""
        ...

    @property
    def multiplies(self) -> bool:
        """Whether `product` may be called: these kernels have products of w8a8."""
        ...

    def product(self, q: I8, scale: F32) -> Product:
        """The product with weights q [K,N] and column scales [N]. It copies `q` and keeps `scale`."""
        ...

    @property
    def group_multiplies(self) -> bool:
        """Whether `group_product` may be called."""
        ...

    def group_product(self, q4: U8, gs: F16, scale: F32) -> Product:
        """The w4a8 product with nibbles q4 [K/2,N], group factors gs [K/32,N] and column scales [N].

        It copies `q4` and `gs` and keeps `scale`.
        """
        ...

    def record(self, parts: Sequence[Callable[[], None]]) -> Program:
        """`parts` as a program that may be run again and again, also when the contents of their buffers have changed.

        Each part calls kernels and products of this object, all result buffers given, and does nothing else; it is
        called once, now, and computes nothing. No other thread may use this object meanwhile.
        """
        ...

    @property
    def records(self) -> bool:
        """Whether `record` may be called: programs are faster here than calls."""
        ...

"""The interface of the CPU kernels, `Kernels`, which the executor calls."""

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


class Matmul(Protocol):
    """A matmul with quantised weights; `execution.cpu.linears` defines its bits."""

    def __call__(self, rows: U8, out: F32) -> None:
        """Multiplies rows [R,K] (zero point 128) into out [R,N]. Raises ExecutionError for wrong buffers."""
        ...


class Program(Protocol):
    """A sequence of kernel calls, in parts (one part per block)."""

    def run(self, seconds: list[float]) -> None:
        """Makes the calls, and appends the wall time of each finished part to `seconds`. Raises what a call raises."""
        ...


class Kernels(Protocol):
    """CPU kernels on float32 rows; `blockrelay_worker.kernels.specification` defines their bits.

    R rows, H hidden, D head_dim (a multiple of 8, 256 at most), Hq query heads, Hkv key/value heads (Hq a multiple of
    Hkv), PAGE = 16. All arrays are C-contiguous with exactly the dtypes named here. Result buffers are passed by the
    caller (overwritten and returned) or else allocated; they must not overlap an argument. Wrong dtypes, shapes,
    layouts or indices raise `ExecutionError` before anything is written. Several threads may call one object, on
    disjoint buffers. R = 0 is allowed. A row that is not finite has no effect on other rows.
    """

    @property
    def isa(self) -> str:
        """Name of the instruction set: a key of `libraries.ISAS`, or `reference`. For logs only."""
        ...

    def norm_quantise(
        self, x: F32, weight: F32, eps: float, *, u: U8 | None = None, scale: F32 | None = None
    ) -> tuple[U8, F32]:
        """Returns quantise(norm(x)): x [R,H], weight [H] -> (u [R,H], scale [R])."""
        ...

    def norm(self, x: F32, weight: F32, eps: float, *, out: F32 | None = None) -> F32:
        """Returns the root mean square norm: x [R,H], weight [H] -> [R,H]."""
        ...

    def quantise(self, x: F32, *, u: U8 | None = None, scale: F32 | None = None) -> tuple[U8, F32]:
        """Quantises each row: x [R,H] -> (u [R,H], scale [R]) with x ~ (u - 128) * scale.

        A row that is not finite gets the scale NaN.
        """
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
        """Scales, biases, normalises and rotates the heads of each row; writes keys and values to the row's page slot.

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
        """Adds in place: x [R,H] += y [R,H] * row_scale [R]; without `row_scale`, x += y."""
        ...

    def scale_rows(self, x: F32, row_scale: F32) -> None:
        """Multiplies in place: x [R,H] *= row_scale [R]."""
        ...

    def swiglu_quantise(
        self, gate_up: F32, row_scale: F32, *, u: U8 | None = None, scale: F32 | None = None
    ) -> tuple[U8, F32]:
        """Returns quantise(swiglu(gate_up * row_scale)) as (u [R,M], scale [R]).

        gate_up is [R,2M], gate columns before up columns; row_scale is [R].
        """
        ...

    def swiglu(self, gate_up: F32, *, out: F32 | None = None) -> F32:
        """Returns (gate / (1 + exp(-gate))) * up: gate_up [R,2M], gate columns before up columns -> [R,M]."""
        ...

    @property
    def has_matmul(self) -> bool:
        """True if `matmul` may be called: these kernels have a w8a8 matmul."""
        ...

    def matmul(self, q: I8, scale: F32) -> Matmul:
        """Makes the w8a8 matmul with weights q [K,N] and column scales [N]. It copies `q` and keeps `scale`."""
        ...

    @property
    def has_group_matmul(self) -> bool:
        """True if `group_matmul` may be called: these kernels have a w4a8 matmul."""
        ...

    def group_matmul(self, q4: U8, gs: F16, scale: F32) -> Matmul:
        """Makes the w4a8 matmul with nibbles q4 [K/2,N], group factors gs [K/32,N] and column scales [N].

        It copies `q4` and `gs` and keeps `scale`.
        """
        ...

    def record(self, parts: Sequence[Callable[[], None]]) -> Program:
        """Records `parts` as a program, which can be run again and again on the same buffers with other contents.

        Each part calls kernels and matmuls of this object, with all result buffers passed, and does nothing else. It
        is called once, now, and computes nothing. No other thread may use this object meanwhile.
        """
        ...

    @property
    def records(self) -> bool:
        """True if `record` may be called: recorded programs are then faster than single calls."""
        ...

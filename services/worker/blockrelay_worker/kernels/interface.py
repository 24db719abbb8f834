"""The CPU kernels that the executor calls, `Kernels`: their arguments, checked here for every implementation."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockrelay_worker.kernels import arguments
from blockrelay_worker.kernels.arguments import F16, F32, F64, FLOAT16, FLOAT32, I8, I32, I64, U8, Pages
from blockrelay_worker.kernels.specification import PAGE

#: An argument of a native function; an array is passed as its address.
Value: TypeAlias = NDArray[Any] | int | float | None
#: Raises the error for an index that is out of range, if there is one.
IndexCheck: TypeAlias = Callable[[], None]


class Linear(ABC):
    """One linear layer [R, K] -> [R, N]; `execution.cpu.linears` defines its bits."""

    @abstractmethod
    def __call__(self, rows: NDArray[Any], out: F32, scale: F32 | None = None) -> None:
        """Multiplies `rows` (uint8 with zero point 128, or float32; contiguous [R, K], R >= 1) into `out` [R, N].

        `scale` [R, K/GROUP] has the rows' scales, and only layers with weights in groups take it: others leave row
        scales to the caller. Our own kernels raise ExecutionError for wrong buffers.
        """

    @property
    def recorded_rows(self) -> int:
        """Largest number of rows for which a call uses our kernels, and so can be recorded in a program."""
        return 0

    def forget_buffers(self) -> None:  # noqa: B027 most layers keep none
        """Drops references to the caller's buffers, which are about to be replaced."""


class Program(Protocol):
    """A sequence of kernel calls, in parts (one part per block)."""

    def run(self, seconds: list[float]) -> None:
        """Makes the calls, and appends the wall time of each finished part to `seconds`. Raises what a call raises.

        One thread at a time calls it.
        """
        ...


def no_indices() -> None:
    """Checks nothing: the call has no indices."""


class Kernels(ABC):
    """CPU kernels on float32 rows; `blockrelay_worker.kernels.specification` defines their bits.

    R rows, H hidden, D head_dim (a multiple of 8, 256 at most), Hq query heads, Hkv key/value heads (Hq a multiple of
    Hkv), PAGE = 16. All arrays are C-contiguous with exactly the dtypes named here. Result buffers are passed by the
    caller (overwritten and returned) or else allocated; they must not overlap an argument. Wrong dtypes, shapes,
    layouts or indices raise `ExecutionError` before anything is written. Several threads may call one object, on
    disjoint buffers. R = 0 is allowed. A row that is not finite has no effect on other rows.
    """

    isa: str
    """Name of the instruction set: a key of `libraries.ISAS`, or `reference`. For logs only."""
    threads: int = 1
    """Number of threads that one call may use, the caller's among them."""
    has_matmul: bool = False
    """True if `matmul` and `group_matmul` may be called: these kernels have matmuls of w8a8 and w4a8."""
    has_sampling: bool = False
    """True if `sample` may be called: these kernels draw tokens."""
    records: bool = False
    """True if `record` may be called: recorded programs are then faster than single calls."""

    @abstractmethod
    def call(self, name: str, *values: Value, check_indices: IndexCheck = no_indices) -> None:
        """Calls the function of kernels.h with this name and, behind the thread pool, these arguments.

        The caller has checked the arguments, except for the values of indices: `check_indices` raises ExecutionError
        if one is out of range. Raises that error, and ExecutionError for a call that fails.
        """

    def norm_quantise(
        self, x: F32, weight: F32, eps: float, *, group: int = 0, u: U8 | None = None, scale: F32 | None = None
    ) -> tuple[U8, F32]:
        """Returns quantise(norm(x)): x [R,H], weight [H] -> (u [R,H], scale [R]); `group` as in `quantise`."""
        rows, hidden = arguments.matrix_shape("x", x)
        arguments.check("weight", weight, FLOAT32, (hidden,))
        u, scale = arguments.quantised_out(u, scale, rows, hidden, group)
        self.call("norm_quantise", x, weight, eps, u, scale, rows, hidden, group)
        return u, scale

    def norm(self, x: F32, weight: F32, eps: float, *, out: F32 | None = None) -> F32:
        """Returns the root mean square norm: x [R,H], weight [H] -> [R,H]."""
        rows, hidden = arguments.matrix_shape("x", x)
        arguments.check("weight", weight, FLOAT32, (hidden,))
        out = arguments.float32_out("out", out, (rows, hidden))
        self.call("norm", x, weight, eps, out, rows, hidden)
        return out

    def quantise(
        self, x: F32, *, hadamard: int = 0, group: int = 0, u: U8 | None = None, scale: F32 | None = None
    ) -> tuple[U8, F32]:
        """Quantises each row: x [R,H] -> (u [R,H], scale [R]) with x ~ (u - 128) * scale.

        `hadamard` is as in `swiglu_quantise`. `group` is 0, or 32 for a scale for each 32 values of a row: then scale
        is [R,H/32]. A row that is not finite gets the scale NaN.
        """
        rows, columns = arguments.matrix_shape("x", x)
        arguments.check_hadamard(hadamard, columns)
        u, scale = arguments.quantised_out(u, scale, rows, columns, group)
        self.call("quantise", x, u, scale, rows, columns, hadamard, group)
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
        """Scales, biases, normalises and rotates the heads of each row; writes keys and values to the row's page slot.

        qkv [R,(Hq+2*Hkv)*D] (all q heads, k heads, v heads), row_scale [R], bias [(Hq+2*Hkv)*D], norm_q and norm_k [D]
        (both or none), cos and sin [P,D/2] with positions [R] in 0..P-1, page [R] in 0..n-1 and slot [R] in 0..15.
        k_pages [n,Hkv,D,16] and v_pages [n,Hkv,16,D], both float16 or both float32, are written in place at (page,
        slot), no other slot is touched; no two rows may name the same slot. Returns q [R,Hq,D], not yet scaled.
        """
        shape = arguments.rotary_shape(
            qkv, row_scale, bias, norm_q, norm_k, cos, sin, positions, page, slot, k_pages, v_pages
        )
        out = arguments.float32_out("out", out, (shape.rows, shape.query_heads, shape.head_dim))

        def check_indices() -> None:
            arguments.check_range("positions", positions, cos.shape[0])
            arguments.check_range("page", page, shape.pages)
            arguments.check_range("slot", slot, PAGE)

        self.call(
            "rotary_append",
            *(qkv, row_scale, bias, norm_q, norm_k),
            eps,
            *(cos, sin, positions, page, slot, k_pages, v_pages, out),
            k_pages.dtype == FLOAT16,
            shape.rows,
            cos.shape[0],
            shape.pages,
            shape.query_heads,
            shape.kv_heads,
            shape.head_dim,
            check_indices=check_indices,
        )
        return out

    def attention(
        self, q: F32, k_pages: Pages, v_pages: Pages, page_table: I32, segments: I64, *, out: F32 | None = None
    ) -> F32:
        """Causal attention of each row over the pages of its segment.

        q [R,Hq,D]; segments [S,3] = (first row, rows, first position), in row order and covering every row once;
        page_table [S,maxpages]: entry p of a segment's line is the page of its positions 16*p..16*p+15 (entries past
        the segment's last position are not read). The segment's own keys and values are already in their pages.
        Returns [R,Hq*D].
        """
        shape = arguments.attention_shape(q, k_pages, v_pages, page_table, segments)
        out = arguments.float32_out("out", out, (shape.rows, shape.query_heads * shape.head_dim))
        self.call(
            "attention",
            *(q, k_pages, v_pages, page_table, segments, out),
            k_pages.dtype == FLOAT16,
            page_table.shape[0],
            page_table.shape[1],
            shape.rows,
            shape.pages,
            shape.query_heads,
            shape.kv_heads,
            shape.head_dim,
            check_indices=lambda: arguments.check_segments(segments, page_table, shape),
        )
        return out

    def add_scaled(self, x: F32, y: F32, row_scale: F32 | None) -> None:
        """Adds in place: x [R,H] += y [R,H] * row_scale [R]; without `row_scale`, x += y."""
        rows, columns = arguments.matrix_shape("x", x)
        arguments.check("y", y, FLOAT32, (rows, columns))
        if row_scale is not None:
            arguments.check("row_scale", row_scale, FLOAT32, (rows,))
        self.call("add_scaled", x, y, row_scale, rows, columns)

    def scale_rows(self, x: F32, row_scale: F32) -> None:
        """Multiplies in place: x [R,H] *= row_scale [R]."""
        rows, columns = arguments.matrix_shape("x", x)
        arguments.check("row_scale", row_scale, FLOAT32, (rows,))
        self.call("scale_rows", x, row_scale, rows, columns)

    def swiglu_quantise(
        self,
        gate_up: F32,
        row_scale: F32 | None,
        hadamard: int,
        *,
        group: int = 0,
        u: U8 | None = None,
        scale: F32 | None = None,
    ) -> tuple[U8, F32]:
        """Returns quantise(hadamard(swiglu(gate_up * row_scale))) as (u [R,M], scale [R]).

        gate_up is [R,2M], gate columns before up columns; row_scale is [R], or None for rows that have their scales.
        `hadamard` is the size of the blocks, a power of two from 16 on that divides M, or 0 for no such step. `group`:
        as in `quantise`.
        """
        rows, columns = arguments.gate_up_shape(gate_up)
        if row_scale is not None:
            arguments.check("row_scale", row_scale, FLOAT32, (rows,))
        arguments.check_hadamard(hadamard, columns)
        u, scale = arguments.quantised_out(u, scale, rows, columns, group)
        self.call("swiglu_quantise", gate_up, row_scale, u, scale, rows, columns, hadamard, group)
        return u, scale

    def swiglu(self, gate_up: F32, row_scale: F32 | None = None, *, out: F32 | None = None) -> F32:
        """Returns (gate / (1 + exp(-gate))) * up of gate_up * row_scale, which are as in `swiglu_quantise`: [R,M]."""
        rows, columns = arguments.gate_up_shape(gate_up)
        if row_scale is not None:
            arguments.check("row_scale", row_scale, FLOAT32, (rows,))
        out = arguments.float32_out("out", out, (rows, columns))
        self.call("swiglu", gate_up, row_scale, out, rows, columns)
        return out

    def matmul(self, q: I8, scale: F32) -> Linear:
        """Makes the w8a8 matmul with weights q [K,N] and column scales [N]. It copies `q` and keeps `scale`.

        Call it only with `has_matmul`: this default raises AssertionError. Others raise ExecutionError for wrong
        arrays.
        """
        raise AssertionError(f"the {self.isa} kernels have no matmul of int8 weights")

    def group_matmul(self, q4: U8, gs: F16, gm: F16) -> Linear:
        """Makes the w4a8 matmul with nibbles q4 [K/2,N], and factors gs and minima gm [K/32,N] of groups.

        It copies all three. Call it only with `has_matmul`: this default raises AssertionError. Others raise
        ExecutionError for wrong arrays.
        """
        raise AssertionError(f"the {self.isa} kernels have no matmul of weights in groups")

    def sample(self, rows: NDArray[np.void], ids: I64, logprobs: F64) -> None:
        """Draws the token of each of `rows` [R] (SAMPLED_ROW), by the numbers that `sampling.sampler` defines.

        Writes the results there, and in line r of `ids` and `logprobs` [R, W] the most likely tokens of row r, as many
        as it asks for and has, W at most. Call it only with `has_sampling`: this default raises AssertionError. Others
        raise ExecutionError for wrong arrays and for an index out of range. Memory at wrong addresses is not noticed.
        """
        raise AssertionError(f"the {self.isa} kernels draw no tokens")

    def record(self, parts: Sequence[Callable[[], None]]) -> Program:
        """Records `parts` as a program, which can be run again and again on the same buffers with other contents.

        Each part calls kernels and matmuls of this object, at least one, with all result buffers passed, and does
        nothing else. It is called once, now, and computes nothing; calls by other threads are made meanwhile. Call
        it only with `records`: this default raises AssertionError.
        """
        raise AssertionError(f"the {self.isa} kernels are called directly")

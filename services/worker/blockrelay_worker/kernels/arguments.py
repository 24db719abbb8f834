"""Types of kernel arguments, and their checks: a wrong buffer raises an error instead of a crash."""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import GROUP, HADAMARD_SIZES, HEAD_DIMS, is_head_dim
from blockrelay.errors import ExecutionError
from blockrelay_worker.kernels.specification import PAGE

F16: TypeAlias = NDArray[np.float16]
F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
U8: TypeAlias = NDArray[np.uint8]
I8: TypeAlias = NDArray[np.int8]
I32: TypeAlias = NDArray[np.int32]
I64: TypeAlias = NDArray[np.int64]
Pages: TypeAlias = NDArray[np.float16] | NDArray[np.float32]

FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
FLOAT16 = np.dtype(np.float16)
UINT8 = np.dtype(np.uint8)
INT8 = np.dtype(np.int8)
INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)


def check(name: str, array: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Raises ExecutionError unless `array` is C-contiguous with exactly this dtype and shape."""
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        layout = "C-contiguous" if array.flags.c_contiguous else "not C-contiguous"
        raise ExecutionError(
            f"kernel argument {name}: expected C-contiguous {dtype}{list(shape)}, "
            f"got {layout} {array.dtype}{list(array.shape)}"
        )


def matrix_shape(name: str, array: NDArray[Any]) -> tuple[int, int]:
    """Returns (rows, columns) of a float32 matrix. Raises ExecutionError for anything else or for no columns."""
    if array.ndim != 2 or array.shape[1] == 0:
        raise ExecutionError(f"kernel argument {name}: expected a matrix with columns, got {list(array.shape)}")
    check(name, array, FLOAT32, array.shape)
    return array.shape


def float32_out(name: str, buffer: F32 | None, shape: tuple[int, ...]) -> F32:
    """Returns the caller's result buffer after a check, or a new one. Raises ExecutionError for a wrong buffer."""
    if buffer is None:
        return np.empty(shape, FLOAT32)
    check(name, buffer, FLOAT32, shape)
    return buffer


def scale_shape(rows: int, columns: int, group: int) -> tuple[int, ...]:
    """Returns the shape of the scales of quantised rows: [rows], or [rows, columns / group] where `group` is not 0.

    Raises ExecutionError unless `group` is 0, or is GROUP and divides `columns`.
    """
    if not group:
        return (rows,)
    if group != GROUP or columns % group:
        raise ExecutionError(
            f"kernel argument group: {columns} columns have no groups of {group}, only of {GROUP} or 0"
        )
    return rows, columns // group


def quantised_out(u: U8 | None, scale: F32 | None, rows: int, columns: int, group: int) -> tuple[U8, F32]:
    """Returns result buffers (u [rows, columns], scale as in `scale_shape`): the caller's after a check, or new ones.

    Raises ExecutionError for a wrong buffer or group.
    """
    shape = scale_shape(rows, columns, group)
    if u is None:
        u = np.empty((rows, columns), UINT8)
    else:
        check("u", u, UINT8, (rows, columns))
    return u, float32_out("scale", scale, shape)


def gate_up_shape(gate_up: F32) -> tuple[int, int]:
    """Returns (R, M) of gate_up [R, 2M]. Raises ExecutionError for an odd number of columns, and as `matrix_shape`."""
    rows, columns = matrix_shape("gate_up", gate_up)
    if columns % 2:
        raise ExecutionError(f"kernel argument gate_up: {columns} columns cannot hold gate and up halves")
    return rows, columns // 2


def check_hadamard(size: int, columns: int) -> None:
    """Raises ExecutionError unless `size` is 0, or a power of two from 16 on that divides `columns`."""
    if size and (size < HADAMARD_SIZES[0] or size & (size - 1) or columns % size):
        raise ExecutionError(f"kernel argument hadamard: {columns} columns have no blocks of {size}")


class HeadShape(NamedTuple):
    """Sizes of one call of a kernel with KV pages; `pages` is the number of pages in the pool."""

    rows: int
    query_heads: int
    kv_heads: int
    head_dim: int
    pages: int


def _pages_shape(k_pages: Pages, v_pages: Pages) -> tuple[int, int, int]:
    """Returns (n, Hkv, D) of k_pages [n,Hkv,D,16] and v_pages [n,Hkv,16,D]. Raises ExecutionError for other shapes."""
    if k_pages.ndim != 4 or k_pages.dtype not in (FLOAT16, FLOAT32):
        raise ExecutionError(
            f"kernel argument k_pages: expected float16 or float32 [n,Hkv,D,{PAGE}], "
            f"got {k_pages.dtype}{list(k_pages.shape)}"
        )
    n, kv_heads, head_dim, _ = k_pages.shape
    check("k_pages", k_pages, k_pages.dtype, (n, kv_heads, head_dim, PAGE))
    check("v_pages", v_pages, k_pages.dtype, (n, kv_heads, PAGE, head_dim))
    if not is_head_dim(head_dim) or kv_heads == 0:
        raise ExecutionError(
            f"kernel argument k_pages: {kv_heads} heads of {head_dim}, expected a head_dim that is {HEAD_DIMS}"
        )
    return n, kv_heads, head_dim


def _grouped(query_heads: int, kv_heads: int) -> None:
    if query_heads <= 0 or query_heads % kv_heads:
        raise ExecutionError(f"{query_heads} query heads cannot share {kv_heads} key/value heads evenly")


def rotary_shape(
    qkv: F32,
    row_scale: F32 | None,
    bias: F32 | None,
    norm_q: F32 | None,
    norm_k: F32 | None,
    cos: F32,
    sin: F32,
    positions: I32,
    page: I32,
    slot: I32,
    k_pages: Pages,
    v_pages: Pages,
) -> HeadShape:
    """Checks the arguments of `Kernels.rotary_append`, except the values of indices, and returns the sizes.

    Raises ExecutionError naming the first wrong argument.
    """
    n, kv_heads, head_dim = _pages_shape(k_pages, v_pages)
    rows, width = matrix_shape("qkv", qkv)
    query_heads = width // head_dim - 2 * kv_heads
    if width % head_dim:
        raise ExecutionError(f"kernel argument qkv: {width} columns are not a whole number of heads of {head_dim}")
    _grouped(query_heads, kv_heads)
    if row_scale is not None:
        check("row_scale", row_scale, FLOAT32, (rows,))
    if bias is not None:
        check("bias", bias, FLOAT32, (width,))
    if (norm_q is None) != (norm_k is None):
        raise ExecutionError("kernel arguments norm_q and norm_k: give both or none")
    if norm_q is not None and norm_k is not None:
        check("norm_q", norm_q, FLOAT32, (head_dim,))
        check("norm_k", norm_k, FLOAT32, (head_dim,))
    check("cos", cos, FLOAT32, (cos.shape[0], head_dim // 2))
    check("sin", sin, FLOAT32, (cos.shape[0], head_dim // 2))
    for name, index in (("positions", positions), ("page", page), ("slot", slot)):
        check(name, index, INT32, (rows,))
    return HeadShape(rows, query_heads, kv_heads, head_dim, n)


def attention_shape(q: F32, k_pages: Pages, v_pages: Pages, page_table: I32, segments: I64) -> HeadShape:
    """Checks the arguments of `Kernels.attention`, except the values of indices, and returns the sizes.

    Raises ExecutionError naming the first wrong argument.
    """
    n, kv_heads, head_dim = _pages_shape(k_pages, v_pages)
    if q.ndim != 3:
        raise ExecutionError(f"kernel argument q: expected [R,Hq,D], got {list(q.shape)}")
    rows, query_heads, _ = q.shape
    check("q", q, FLOAT32, (rows, query_heads, head_dim))
    _grouped(query_heads, kv_heads)
    if page_table.ndim != 2:
        raise ExecutionError(f"kernel argument page_table: expected [S,maxpages], got {list(page_table.shape)}")
    check("page_table", page_table, INT32, page_table.shape)
    check("segments", segments, INT64, (page_table.shape[0], 3))
    return HeadShape(rows, query_heads, kv_heads, head_dim, n)


def check_range(name: str, index: I32, end: int) -> None:
    """Raises ExecutionError unless every index lies in 0..end-1."""
    wrong = np.flatnonzero((index < 0) | (index >= end))
    if wrong.size:
        raise ExecutionError(f"kernel argument {name}: row {wrong[0]} has {index[wrong[0]]}, outside 0..{end - 1}")


def check_segments(segments: I64, page_table: I32, shape: HeadShape) -> None:
    """Raises ExecutionError unless the segments cover the rows in order and their pages exist.

    Each row of `segments` is (first row, number of rows, first position). Both arrays passed `attention_shape`, which
    returned `shape`.
    """
    next_row = 0
    for index, (first_row, rows, first_position) in enumerate(segments.tolist()):
        if first_row != next_row or rows < 0 or first_position < 0:
            raise ExecutionError(
                f"kernel argument segments: segment {index} is ({first_row}, {rows}, {first_position}), "
                f"expected to start at row {next_row}"
            )
        next_row += rows
        needed = -(-(first_position + rows) // PAGE) if rows else 0
        if needed > page_table.shape[1]:
            raise ExecutionError(
                f"kernel argument page_table: segment {index} needs {needed} pages, has {page_table.shape[1]}"
            )
        check_range(f"page_table[{index}]", page_table[index, :needed], shape.pages)
    if next_row != shape.rows:
        raise ExecutionError(f"kernel argument segments: they cover {next_row} of {shape.rows} rows")

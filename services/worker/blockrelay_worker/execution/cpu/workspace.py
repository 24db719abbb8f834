"""Buffers of one executor, reused from step to step.

The system maps fresh memory page by page while it is first written: with new buffers in every step, a large prompt ran
2.5 times slower. The address of a buffer stays the same until a larger workspace replaces it, so that bindings to it
can be kept.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import GROUP, ModelConfig
from blockrelay_worker.kernels.buffers import untouched_bytes
from blockrelay_worker.kernels.specification import PAGE


class Workspace:
    """Scratch buffers for at most `capacity` rows. Each method returns a contiguous view of the first rows of one.

    A view holds what was last written to the buffer, and is valid until the same method is called again.
    """

    def __init__(
        self, model: ModelConfig, capacity: int, places: Callable[[int], NDArray[np.uint8]] = untouched_bytes
    ) -> None:
        """`places` makes the buffers that say where rows are: positions, KV pages, slots, segments and page tables."""
        self.capacity = capacity
        attention = model.heads * model.head_dim
        widest_in = max(model.hidden_size, attention, model.intermediate_size)
        widest_out = max(model.qkv_columns, model.hidden_size, 2 * model.intermediate_size)
        self._indexes = tuple(places(capacity * 4) for _ in range(3))
        self._segments = places(capacity * 3 * 8)
        self._table = places(capacity * _table_width(-(-model.max_position // PAGE)) * 4)
        self._hidden = untouched_bytes(capacity * model.hidden_size * 4)
        self._wanted = untouched_bytes(capacity * model.hidden_size * 4)
        self._quantised = untouched_bytes(capacity * widest_in)
        groups = max(1, widest_in // GROUP)
        self._scales = (untouched_bytes(capacity * groups * 4), untouched_bytes(capacity * groups * 4))
        self._normed = untouched_bytes(capacity * widest_in * 4)
        self._linear_output = untouched_bytes(capacity * widest_out * 4)
        self._query = untouched_bytes(capacity * attention * 4)
        self._mixed = untouched_bytes(capacity * attention * 4)

    def indexes(self, rows: int) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Position, KV page and slot of each row, int32 [rows] each."""
        position, page, slot = (buffer[: rows * 4].view(np.int32) for buffer in self._indexes)
        return position, page, slot

    def segments(self, count: int) -> NDArray[np.int64]:
        """Segments as `Kernels.attention` takes them, int64 [count, 3]; `count` is at most `capacity`."""
        return self._segments[: count * 3 * 8].view(np.int64).reshape(count, 3)

    def page_table(self, segments: int, pages: int) -> NDArray[np.int32]:
        """The page table for `Kernels.attention`, int32 [segments, width].

        Its width is `pages` rounded up to a power of two, at least 8, so that later batches mostly have the same one.
        """
        width = _table_width(pages)
        return self._table[: segments * width * 4].view(np.int32).reshape(segments, width)

    def hidden(self, rows: int, width: int) -> NDArray[np.float32]:
        """The residual stream, float32 [rows, width]."""
        return _floats(self._hidden, rows, width)

    def wanted(self, rows: int, width: int) -> NDArray[np.float32]:
        """Rows gathered for the head, float32 [rows, width]."""
        return _floats(self._wanted, rows, width)

    def quantised(self, rows: int, width: int) -> NDArray[np.uint8]:
        """Input of a linear layer with quantised rows, uint8 [rows, width]."""
        return self._quantised[: rows * width].reshape(rows, width)

    def scale(self, which: int, rows: int, width: int, group: int) -> NDArray[np.float32]:
        """Scales of quantised rows of `width` values, float32 [rows], or [rows, width / group] where `group` is not 0.

        There are two buffers (`which` 0 or 1): SwiGLU reads one and writes the other.
        """
        if group:
            return _floats(self._scales[which], rows, width // group)
        return self._scales[which][: rows * 4].view(np.float32)

    def normed(self, rows: int, width: int) -> NDArray[np.float32]:
        """Input of a linear layer with float32 rows, float32 [rows, width]."""
        return _floats(self._normed, rows, width)

    def linear_output(self, rows: int, width: int) -> NDArray[np.float32]:
        """Output of a linear layer, float32 [rows, width]; the next layer overwrites it."""
        return _floats(self._linear_output, rows, width)

    def query(self, rows: int, heads: int, head_dim: int) -> NDArray[np.float32]:
        """Rotated queries, float32 [rows, heads, head_dim]."""
        return _floats(self._query, rows, heads * head_dim).reshape(rows, heads, head_dim)

    def mixed(self, rows: int, width: int) -> NDArray[np.float32]:
        """Output of attention, float32 [rows, width]."""
        return _floats(self._mixed, rows, width)


def _floats(buffer: NDArray[Any], rows: int, width: int) -> NDArray[np.float32]:
    return buffer[: rows * width * 4].view(np.float32).reshape(rows, width)


def _table_width(pages: int) -> int:
    return max(8, 1 << (pages - 1).bit_length())

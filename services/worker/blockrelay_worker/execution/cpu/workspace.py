"""Buffers of one executor, reused from step to step.

Fresh memory is faulted in page by page while it is first written: with new buffers every step, a large prompt ran 2.5x
slower. A buffer's beginning stays where it is until the workspace grows, so bindings to it can be kept.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import ModelConfig
from blockrelay_worker.kernels.buffers import untouched_bytes
from blockrelay_worker.kernels.specification import PAGE


class Workspace:
    """Scratch for at most `capacity` rows. Each method returns a contiguous view of R rows of one buffer."""

    def __init__(self, model: ModelConfig, capacity: int) -> None:
        self.capacity = capacity
        attention = model.heads * model.head_dim
        widest_in = max(model.hidden_size, attention, model.intermediate_size)
        widest_out = max(model.qkv_columns, model.hidden_size, 2 * model.intermediate_size)
        self._indexes = tuple(untouched_bytes(capacity * 4) for _ in range(3))
        self._segments = untouched_bytes(capacity * 3 * 8)
        self._table = untouched_bytes(capacity * _table_width(-(-model.max_position // PAGE)) * 4)
        self._hidden = untouched_bytes(capacity * model.hidden_size * 4)
        self._wanted = untouched_bytes(capacity * model.hidden_size * 4)
        self._quantised = untouched_bytes(capacity * widest_in)
        self._scales = (untouched_bytes(capacity * 4), untouched_bytes(capacity * 4))
        self._normed = untouched_bytes(capacity * widest_in * 4)
        self._product = untouched_bytes(capacity * widest_out * 4)
        self._query = untouched_bytes(capacity * attention * 4)
        self._mixed = untouched_bytes(capacity * attention * 4)

    def indexes(self, rows: int) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Position, page and slot of each row."""
        position, page, slot = (buffer[: rows * 4].view(np.int32) for buffer in self._indexes)
        return position, page, slot

    def segments(self, count: int) -> NDArray[np.int64]:
        """As `attention` takes them; at most as many as rows."""
        return self._segments[: count * 3 * 8].view(np.int64).reshape(count, 3)

    def page_table(self, segments: int, pages: int) -> NDArray[np.int32]:
        """As `attention` takes it, with at least `pages` columns: batches to come mostly have the same number."""
        width = _table_width(pages)
        return self._table[: segments * width * 4].view(np.int32).reshape(segments, width)

    def hidden(self, rows: int, width: int) -> NDArray[np.float32]:
        """The residual stream, float32 [rows, width]."""
        return _floats(self._hidden, rows, width)

    def wanted(self, rows: int, width: int) -> NDArray[np.float32]:
        """Rows gathered for the head."""
        return _floats(self._wanted, rows, width)

    def quantised(self, rows: int, width: int) -> NDArray[np.uint8]:
        """Input of a product with quantised rows."""
        return self._quantised[: rows * width].reshape(rows, width)

    def scale(self, which: int, rows: int) -> NDArray[np.float32]:
        """Row scales; two of them (0 and 1), because SwiGLU reads one and writes another."""
        return self._scales[which][: rows * 4].view(np.float32)

    def normed(self, rows: int, width: int) -> NDArray[np.float32]:
        """Input of an fp32 product."""
        return _floats(self._normed, rows, width)

    def product(self, rows: int, width: int) -> NDArray[np.float32]:
        """Output of a product; overwritten by the next one."""
        return _floats(self._product, rows, width)

    def query(self, rows: int, heads: int, head_dim: int) -> NDArray[np.float32]:
        """Rotated queries [rows, heads, head_dim]."""
        return _floats(self._query, rows, heads * head_dim).reshape(rows, heads, head_dim)

    def mixed(self, rows: int, width: int) -> NDArray[np.float32]:
        """What attention returns."""
        return _floats(self._mixed, rows, width)


def _floats(buffer: NDArray[Any], rows: int, width: int) -> NDArray[np.float32]:
    return buffer[: rows * width * 4].view(np.float32).reshape(rows, width)


def _table_width(pages: int) -> int:
    return max(8, 1 << (pages - 1).bit_length())

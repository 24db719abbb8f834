"""The memory that the ranks of a stage share: where each of them finds what.

Every rank makes the same `GroupMemory` from the same file. Pages of the file that are not touched take no memory.
"""

import mmap
import os
import sys
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import UsageError
from blockrelay.host.cpu import MAX_RANKS
from blockrelay_worker.execution.page_layout import PageLayout
from blockrelay_worker.execution.ranks.shares import Cut, widest
from blockrelay_worker.kernels.arguments import F32, I32, Pages

#: Bytes of an event, as in meeting.h; and of a message.
EVENT_BYTES, MESSAGE_BYTES = 64, 1 << 16


class SharedFile:
    """A file in memory, without a name, of which processes map the same parts one after the other."""

    def __init__(self, descriptor: int | None = None) -> None:
        """`descriptor` is that of the file that another process has made; None: makes a file, which grows.

        Raises UsageError on systems without such files.
        """
        if descriptor is None:
            if sys.platform != "linux":
                raise UsageError("tensor_parallel needs Linux: leave it out")
            self.descriptor, self._grows = os.memfd_create("blockrelay-ranks", os.MFD_CLOEXEC), True
        else:
            self.descriptor, self._grows = descriptor, False
        self._end = 0

    def take(self, size: int) -> NDArray[np.uint8]:
        """Returns the next `size` bytes, zeros at first, page aligned. Raises MemoryError if they cannot be mapped."""
        size = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            if self._grows:
                os.ftruncate(self.descriptor, self._end + size)
            mapping = mmap.mmap(self.descriptor, size, offset=self._end)
        except OSError as error:
            raise MemoryError(f"the system gives no {size} bytes of memory for ranks") from error
        self._end += size
        return np.frombuffer(mapping, np.uint8)

    def close(self) -> None:
        """Closes the file, unless it is closed. What was mapped stays."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@dataclass(frozen=True, slots=True)
class Mailbox:
    """Memory for messages from one rank to another, one at a time."""

    sent: NDArray[np.uint8]
    """The event that counts messages."""
    taken: NDArray[np.uint8]
    """The event that counts those that were read."""
    length: NDArray[np.int64]
    content: NDArray[np.uint8]


class GroupMemory:
    """All that ranks share. Rank 0 writes the rows' places, the stage's input and the rows that are wanted."""

    def __init__(self, file: SharedFile, cut: Cut, layout: PageLayout, *, pages: int, capacity: int) -> None:
        """For a stage with this layout of whole KV pages, and batches of `capacity` rows at most."""
        model, ranks = cut.model, len(cut.shares)
        self.file = file
        self.meeting = file.take(EVENT_BYTES * (1 + MAX_RANKS))
        #: Messages from rank 0 to each rank, and from each rank to rank 0.
        self.to_rank = [_mailbox(file.take(2 * EVENT_BYTES + 8 + MESSAGE_BYTES)) for _ in range(ranks)]
        self.to_first = [_mailbox(file.take(2 * EVENT_BYTES + 8 + MESSAGE_BYTES)) for _ in range(ranks)]
        self._input = file.take(capacity * model.hidden_size * 4)
        self._wanted = file.take(capacity * 4)
        #: Two buffers of each rank for its columns of a matrix.
        self.parts = [[file.take(capacity * widest(model, [share]) * 4) for _ in range(2)] for share in cut.shares]
        #: The KV pages of each rank: those of its heads.
        self.kv = [RankPages(file, layout, len(share.kv_heads), pages) for share in cut.shares]

    def input(self, rows: int, width: int) -> F32:
        """The input of the stage, or the embeddings of its tokens, float32 [rows, width]."""
        return self._input[: rows * width * 4].view(np.float32).reshape(rows, width)

    def wanted(self, count: int) -> I32:
        """The rows whose logits are wanted, int32 [count]."""
        return self._wanted[: count * 4].view(np.int32)


class RankPages:
    """The KV pages of one rank in all layers of the stage, as `PageMemory` has them, with its heads only."""

    def __init__(self, file: SharedFile, layout: PageLayout, heads: int, pages: int) -> None:
        """`layout` is that of the stage's whole pages."""
        k_shape, v_shape = replace(layout, kv_heads=heads).shapes(pages)
        half = prod(k_shape) * np.dtype(layout.dtype).itemsize
        content = file.take(2 * layout.layers * half)
        halves = [
            cast(Pages, content[at * half : (at + 1) * half].view(layout.dtype)) for at in range(2 * layout.layers)
        ]
        self.k_pages: list[Pages] = [k.reshape(k_shape) for k in halves[::2]]
        self.v_pages: list[Pages] = [v.reshape(v_shape) for v in halves[1::2]]


def _mailbox(content: NDArray[Any]) -> Mailbox:
    head = 2 * EVENT_BYTES
    return Mailbox(
        content[:EVENT_BYTES], content[EVENT_BYTES:head], content[head : head + 8].view(np.int64), content[head + 8 :]
    )

"""A ring buffer in anonymous memory that two processes share. It has no name, so nothing of it can be left behind."""

import mmap
import os
import sys
from collections import deque

from blockrelay.errors import WireError
from blockrelay_worker.policy import MAX_RING_BYTES


class RingSpace:
    """The allocation of a ring's bytes, as its writer sees it. Pure.

    A message takes consecutive bytes, and messages free them in the same order. When nothing is taken, the next one
    begins at the front again: so the ring touches no more memory than was ever unread at once.
    """

    def __init__(self, size: int) -> None:
        """`size` is that of the ring, in bytes."""
        self.size = size
        self._taken: deque[tuple[int, int]] = deque()
        self._end = 0
        self._read = 0

    @property
    def unread(self) -> int:
        """Number of unread messages."""
        return len(self._taken)

    def take(self, length: int) -> int | None:
        """Takes `length` (>= 1) consecutive bytes and returns their offset; None if no such piece is free."""
        begin = self._free_piece(length)
        if begin is not None:
            self._end = begin + length
            self._taken.append((begin, self._end))
        return begin

    def was_read(self, count: int) -> None:
        """Frees the bytes of messages: the reader has copied `count` of them since the beginning.

        Raises WireError if that is impossible.
        """
        if not self._read <= count <= self._read + len(self._taken):
            raise WireError(f"{count} messages cannot have been read after {self._read} of {len(self._taken)} more")
        for _ in range(count - self._read):
            self._taken.popleft()
        self._read = count

    def _free_piece(self, length: int) -> int | None:
        if not self._taken:
            return 0 if length <= self.size else None
        oldest = self._taken[0][0]
        if self._end <= oldest:  # the taken bytes wrap around the end; if equal, all bytes are taken
            return self._end if length <= oldest - self._end else None
        if length <= self.size - self._end:
            return self._end
        return 0 if length <= oldest else None


def new_ring(size: int) -> tuple[int, mmap.mmap]:
    """Creates a ring of `size` bytes. Returns its file descriptor, which the caller closes, and its mapped memory.

    `size` is at least 1. It is sealed, so that no writer can shrink the ring under its reader. Raises OSError if that
    fails, and on other systems than Linux.
    """
    if sys.platform != "linux":
        raise OSError("this system has no such memory")
    import fcntl

    ring = os.memfd_create("blockrelay-rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(ring, size)
        fcntl.fcntl(ring, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return ring, mmap.mmap(ring, size)
    except BaseException:
        os.close(ring)
        raise


def map_ring(ring: int) -> mmap.mmap:
    """Maps another process's ring for reading, from its file descriptor.

    The caller may close the descriptor afterwards. Raises WireError for a ring that could still be shrunk, is empty, or
    is larger than MAX_RING_BYTES, and for a descriptor of anything else. Raises OSError on other systems than Linux.
    """
    if sys.platform != "linux":
        raise OSError("this system has no such memory")
    import fcntl

    try:
        seals = fcntl.fcntl(ring, fcntl.F_GET_SEALS)
        size = os.fstat(ring).st_size
        if not seals & fcntl.F_SEAL_SHRINK or not 0 < size <= MAX_RING_BYTES:
            raise WireError(f"a ring of {size} bytes with seals {seals:#x} is not read")
        return mmap.mmap(ring, size, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise WireError(f"what came is no ring: {error}") from error

"""A ring of bytes in anonymous memory that two processes share: nothing of it has a name, so nothing of it can stay."""

import mmap
import os
import sys
from collections import deque

from blockrelay.errors import WireError

#: A ring that is larger is not mapped.
MAX_RING_BYTES = 1 << 32


class Space:
    """Which bytes of a ring are taken, as its writer sees it. Pure.

    A message takes bytes in one piece, and they are given back in the order in which they were taken. When nothing is
    taken it begins at the front again, so that the memory in use is no more than what was ever unread at once.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: deque[tuple[int, int]] = deque()
        self._end = 0
        self._read = 0

    @property
    def unread(self) -> int:
        """Messages."""
        return len(self._taken)

    def take(self, length: int) -> int | None:
        """Where `length` (>= 1) bytes begin that are free; None when no such piece is."""
        begin = self._free_piece(length)
        if begin is not None:
            self._end = begin + length
            self._taken.append((begin, self._end))
        return begin

    def was_read(self, count: int) -> None:
        """The reader has copied `count` messages since the beginning. Raises WireError when that cannot be."""
        if not self._read <= count <= self._read + len(self._taken):
            raise WireError(f"{count} messages cannot have been read after {self._read} of {len(self._taken)} more")
        for _ in range(count - self._read):
            self._taken.popleft()
        self._read = count

    def _free_piece(self, length: int) -> int | None:
        if not self._taken:
            return 0 if length <= self.size else None
        oldest = self._taken[0][0]
        if self._end <= oldest:  # what is taken goes around the end; equal: all is
            return self._end if length <= oldest - self._end else None
        if length <= self.size - self._end:
            return self._end
        return 0 if length <= oldest else None


def new_ring(size: int) -> tuple[int, mmap.mmap]:
    """A ring's descriptor and its bytes. Neither side can change its size: whoever reads it is not cut off."""
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
    """The bytes of somebody else's ring, to be read. Raises WireError for what could be cut off under our eyes."""
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

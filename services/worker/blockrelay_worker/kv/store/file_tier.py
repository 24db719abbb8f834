"""Tiers of one host: files in a folder that its workers share, on /dev/shm or, for preempted runs alone, on a disk.

A file holds one page of consecutive blocks, one record after the other, and is named `<block hash>.<first>-<last>`. It
appears by renaming, so that no reader sees half of one, and is never written again. Its modification time is its last
use; that of a held page lies in the future. A worker whose stage has other blocks than the writer's reads its records
from the files that have them.
"""

import errno
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from blockrelay_worker.kv.block_hashes import HASH_BYTES
from blockrelay_worker.kv.store.tier import StoredPage, TierFailure
from blockrelay_worker.policy import ABANDONED_FILE_S, HOLD_S

_BEGUN = ".begun-"
_PAGE = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}\.([0-9]+)-([0-9]+)")
_HOLD_NS = int(HOLD_S * 1e9)
#: Numbers of unfinished files: a process has two stores while it moves to another stage.
_SERIAL = itertools.count()


class FileTier:
    """A tier of at most `limit` bytes in all files together; concurrent writers may exceed it by a sixteenth each.

    Implements `Tier`. `trouble` is called for each failure; no method but the constructor (OSError for the folder)
    raises for one. A method's `blocks` are consecutive and at least one; a page has one record for each.
    """

    def __init__(
        self,
        folder: Path,
        *,
        label: str = "shm",
        limit: int,
        record_bytes: int,
        trouble: Callable[[TierFailure], None],
        blocks: range = range(0),
        swap: bool = False,
    ) -> None:
        """`record_bytes`: size of every record of this model. Creates the folder if it is missing.

        Files of exactly these `blocks` are found as soon as they are written, others after the next scan of the folder.
        `swap`: held pages may fill the whole limit, and a page that is read or let go is removed.
        """
        self.label = label
        self._is_swap, self._most_held = swap, limit if swap else limit // 2
        self._held = 0  # bytes of held pages at the last scan, plus those held here since
        self._own = frozenset({(blocks[0], blocks[-1])} if blocks else ())
        self._folder, self._limit, self._record_bytes, self._trouble = str(folder), limit, record_bytes, trouble
        self._used = 0  # bytes in the folder at the last scan, plus those written here since
        self._unseen = 0  # bytes written here since the last scan
        self._ranges: frozenset[tuple[int, int]] = frozenset()  # (first block, last block) of the files here
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._look()

    def may_have(self, block_hash: bytes) -> bool:
        """Returns whether the folder has a file of this page, with any range of blocks that is known here."""
        return any(os.path.exists(self._path(block_hash, *blocks)) for blocks in self._ranges)

    def get(self, hashes: Sequence[bytes], blocks: range) -> list[list[bytes] | None]:
        """Returns for each page the records of all `blocks`, unverified; None if one is missing. Counts as a use."""
        now = time.time_ns()
        pages: list[list[bytes] | None] = []
        for index, block_hash in enumerate(hashes):
            # Later pages are worth nothing without the earlier ones: they count as used a little before.
            pages.append(self._read(block_hash, blocks, now - index * 1000))
        return pages

    def put(self, pages: Sequence[StoredPage], blocks: range) -> None:
        """Writes a file for each page that has none of exactly these `blocks`; removes least recently used files.

        A page larger than the limit is not stored. Pages in a swap folder are held from the beginning.
        """
        until = time.time_ns() + _HOLD_NS if self._is_swap else None
        for page in pages:
            path = self._path(page.block_hash, blocks[0], blocks[-1])
            size = sum(map(len, page.records))
            if size > self._limit or os.path.exists(path):
                continue
            if not self._make_room(size):
                self._trouble("full")  # of pages that are held
            elif self._write(path, page.records, size, until):
                self._used += size
                self._unseen += size
                self._ranges |= {(blocks[0], blocks[-1])}

    def hold(self, hashes: Sequence[bytes], blocks: range) -> list[bool]:
        """Holds those of the pages that have files with all `blocks`; returns for each whether it is held."""
        now = time.time_ns()
        if self._held >= self._most_held:
            self._look()
        return [self._hold(block_hash, blocks, now, index) for index, block_hash in enumerate(hashes)]

    def let_go(self, hashes: Sequence[bytes], blocks: range) -> None:
        """Ends the holding of these pages; removes them from a swap folder."""
        now = time.time_ns()
        for index, block_hash in enumerate(hashes):
            for path, _, _ in self._files(block_hash, blocks):
                if self._is_swap:
                    _remove(path)
                else:
                    _touch(path, now - index * 1000)

    def discard(self, block_hash: bytes, blocks: range) -> None:
        """Removes all files of this page that hold one of `blocks`."""
        for path, _, _ in self._files(block_hash, blocks):
            _remove(path)

    def used_bytes(self) -> int:
        """Bytes in the folder at the last scan, plus those that this process has written since."""
        return self._used

    def _path(self, block_hash: bytes, first: int, last: int) -> str:
        return f"{self._folder}/{block_hash.hex()}.{first}-{last}"

    def _files(self, block_hash: bytes, blocks: range) -> list[tuple[str, int, int]]:
        """Returns path, first and last block of each file that this page may have with some of `blocks`."""
        ranges = [(first, last) for first, last in self._ranges if first < blocks.stop and last >= blocks.start]
        return [(self._path(block_hash, first, last), first, last) for first, last in ranges]

    def _hold(self, block_hash: bytes, blocks: range, now_ns: int, index: int) -> bool:
        """Holds a page, the one of this index among others, unless it lacks some of `blocks` or too much is held."""
        there: dict[str, range] = {}
        more = 0
        for path, first, last in self._files(block_hash, blocks):
            with suppress(OSError):  # there is none
                status = os.stat(path, follow_symlinks=False)
                there[path] = range(first, last + 1)
                more += 0 if status.st_mtime_ns > now_ns else status.st_size
        if not set(blocks) <= {block for each in there.values() for block in each}:
            return False
        if more and self._held >= self._most_held:
            return False
        self._held += more
        for path in there:
            _touch(path, now_ns + _HOLD_NS - index * 1000)
        return True

    def _read(self, block_hash: bytes, blocks: range, used_ns: int) -> list[bytes] | None:
        """Reads the records from the file of exactly these blocks, else from those that overlap."""
        exact = (blocks[0], blocks[-1])
        records: dict[int, bytes] = {}
        for first, last in (exact, *(self._ranges - {exact})):
            wanted = [b for b in blocks if first <= b <= last and b not in records]
            if wanted:
                records.update(self._read_file(self._path(block_hash, first, last), first, wanted, used_ns))
            if len(records) == len(blocks):
                return [records[block] for block in blocks]
        return None

    def _read_file(self, path: str, first: int, wanted: list[int], used_ns: int) -> dict[int, bytes]:
        size = self._record_bytes
        if sys.platform == "win32":
            return {}  # Windows has no such folder
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return {}
        except OSError:
            self._trouble("unreachable")
            return {}
        try:
            data = os.pread(handle, (wanted[-1] - wanted[0] + 1) * size, (wanted[0] - first) * size)
            os.utime(handle, ns=(used_ns, used_ns))
        except OSError:
            self._trouble("unreachable")
            return {}
        finally:
            os.close(handle)
        if self._is_swap:
            _remove(path)
        return {block: data[(block - wanted[0]) * size :][:size] for block in wanted}

    def _write(self, path: str, records: Sequence[bytes | memoryview], size: int, used_ns: int | None) -> bool:
        if sys.platform == "win32":
            return False  # Windows has no such folder
        unfinished = f"{self._folder}/{_BEGUN}{os.getpid()}-{next(_SERIAL)}"
        try:
            handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                written = os.writev(handle, records)
                if used_ns is not None:
                    os.utime(handle, ns=(used_ns, used_ns))
            finally:
                os.close(handle)
            if written == size:
                os.rename(unfinished, path)
                return True
            self._trouble("full")
        except OSError as error:
            self._trouble("full" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM) else "unreachable")
        _remove(unfinished)
        return False

    def _make_room(self, size: int) -> bool:
        """Returns whether there is room for `size` bytes, after the removal of other files."""
        if self._used + size > self._limit or self._unseen > self._limit // 16:
            self._look(keep=self._limit - size)
        return self._used + size <= self._limit

    def _look(self, keep: int | None = None) -> None:
        """Scans the folder. If it has more than `keep` bytes, removes the least recently used files that are not held.

        It then removes a sixteenth of the limit more than needed, so that not every write scans.
        """
        now = time.time_ns()
        files: list[tuple[int, int, str]] = []
        ranges: set[tuple[int, int]] = set()
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if not is_of_a_tier(entry.name):
                        continue  # such as the lock of who owns the folder
                    if blocks := _blocks_of(entry.name):
                        ranges.add(blocks)
                    with suppress(OSError):  # another process has removed it
                        status = entry.stat(follow_symlinks=False)
                        files.append((status.st_mtime_ns, status.st_size, entry.path))
        except OSError:
            self._trouble("unreachable")
        for used_ns, _, path in files:
            if _BEGUN in path and now - used_ns > ABANDONED_FILE_S * 1e9:
                _remove(path)
        total = sum(size for _, size, _ in files)
        if keep is not None and total > keep:
            for used_ns, size, path in sorted(files):
                if total <= keep - self._limit // 16 or used_ns > now:
                    break
                _remove(path)
                total -= size
        self._held = sum(size for used_ns, size, _ in files if used_ns > now)
        self._used, self._unseen, self._ranges = total, 0, self._own | ranges


def is_of_a_tier(file_name: str) -> bool:
    """Returns whether a file of this name is a page, or one that was begun: no other file may be removed."""
    return file_name.startswith(_BEGUN) or _blocks_of(file_name) is not None


def _blocks_of(file_name: str) -> tuple[int, int] | None:
    """First and last block of a page's file; None for any other file."""
    found = _PAGE.fullmatch(file_name)
    return (int(found[1]), int(found[2])) if found else None


def _touch(path: str, used_ns: int) -> None:
    with suppress(OSError):  # another process has removed it
        os.utime(path, ns=(used_ns, used_ns), follow_symlinks=False)


def _remove(path: str) -> None:
    with suppress(OSError):  # another process removed it, or the next call that needs room tries again
        os.unlink(path)

"""Which free KV pages a request gets: two policies behind one interface.

All pages are of one size, so that neither policy can lack room which the other has. They differ in where pages lie:
`FirstFit` uses the lowest numbers, so that memory that was never used stays unused. `BestFit` gives pages with
consecutive numbers where it can, so that copies to and from a device, and of a whole request, are long.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Protocol, final

from blockrelay.settings.worker import PageAllocation


class FreePages(Protocol):
    """The free pages of a pool. Not thread-safe."""

    def __len__(self) -> int: ...

    def take(self, count: int) -> list[int]:
        """Removes `count` pages and returns their numbers; there must be as many."""
        ...

    def give(self, page: int) -> None:
        """Adds a page, which must not be free."""
        ...

    def numbers(self) -> list[int]:
        """Returns the numbers of all free pages, in order. For idle time and tests."""
        ...


@final
class FirstFit(FreePages):
    """Gives the pages with the lowest numbers."""

    def __init__(self, pages: Iterable[int]) -> None:
        self._pages = sorted(pages)  # a heap

    def __len__(self) -> int:
        return len(self._pages)

    def take(self, count: int) -> list[int]:
        return [heapq.heappop(self._pages) for _ in range(count)]

    def give(self, page: int) -> None:
        heapq.heappush(self._pages, page)

    def numbers(self) -> list[int]:
        return sorted(self._pages)


@final
class BestFit(FreePages):
    """Gives pages out of the smallest gap of consecutive ones that holds all, the lowest of equal ones.

    If no gap holds all, it gives the largest gaps first.
    """

    def __init__(self, pages: Iterable[int]) -> None:
        self._gaps: list[tuple[int, int]] = []  # (length, first page) of each gap, sorted
        self._end_of: dict[int, int] = {}  # end of each gap by its first page
        self._first_of: dict[int, int] = {}  # and its first page by its end
        self._count = 0
        for page in pages:
            self.give(page)

    def __len__(self) -> int:
        return self._count

    def take(self, count: int) -> list[int]:
        taken: list[int] = []
        while lacking := count - len(taken):
            at = bisect_left(self._gaps, (lacking, -1))
            length, first = self._gaps[min(at, len(self._gaps) - 1)]
            used = min(length, lacking)
            self._remove(first)
            taken += range(first, first + used)
            if used < length:
                self._add(first + used, first + length)
        self._count -= count
        return taken

    def give(self, page: int) -> None:
        first, end = page, page + 1
        if (before := self._first_of.get(page)) is not None:
            first = before
            self._remove(before)
        if (behind := self._end_of.get(page + 1)) is not None:
            end = behind
            self._remove(page + 1)
        self._add(first, end)
        self._count += 1

    def numbers(self) -> list[int]:
        return [page for first in sorted(self._end_of) for page in range(first, self._end_of[first])]

    def _add(self, first: int, end: int) -> None:
        self._end_of[first], self._first_of[end] = end, first
        insort(self._gaps, (end - first, first))

    def _remove(self, first: int) -> None:
        end = self._end_of.pop(first)
        del self._first_of[end]
        del self._gaps[bisect_left(self._gaps, (end - first, first))]


def free_pages(pages: Iterable[int], allocation: PageAllocation) -> FreePages:
    """Returns free pages of these numbers, all different, under the policy of this name."""
    return FirstFit(pages) if allocation == "first-fit" else BestFit(pages)

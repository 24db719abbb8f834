"""The page pool as a state machine: whatever is allocated, named, shared and given back, no page is in two places."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from blockrelay.errors import OutOfPages
from blockrelay.settings.worker import PageAllocation
from blockrelay_worker.execution.page_layout import PageLayout
from blockrelay_worker.execution.page_pool import PagePool

PAGES = 6
NAMES = [bytes([i]) * 32 for i in range(8)]


class PagePoolMachine(RuleBasedStateMachine):
    """The model: who has which pages, which name is on which page, and which named pages were used last."""

    held: Bundle[int] = Bundle("held")
    allocation: PageAllocation = "first-fit"

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PageLayout(layers=1, kv_heads=1, head_dim=8), PAGES)
        self.pool.use(self.allocation)
        self.owners: dict[int, list[int]] = {}
        self.names: dict[bytes, int] = {}
        self.lru: list[int] = []
        self.count = 0
        self.evicted = 0
        self.pool.on_evict = self._evicted

    def _evicted(self) -> None:
        self.evicted += 1

    def _new_owner(self, pages: list[int]) -> int:
        self.count += 1
        self.owners[self.count] = pages
        return self.count

    def _users(self) -> set[int]:
        return {page for pages in self.owners.values() for page in pages}

    @rule(target=held, count=st.integers(0, PAGES + 1))
    def allocate(self, count: int) -> int:
        free = PAGES - len(self._users())
        generations = list(self.pool.generations)
        if count > free:
            with pytest.raises(OutOfPages):
                self.pool.allocate(count)
            return self._new_owner([])
        before = self.evicted
        pages = self.pool.allocate(count)
        unnamed_free = free - len(self.lru)
        gone = self.lru[: max(0, count - unnamed_free)]
        assert self.evicted - before == len(gone), "a cached page is given up only when no other is free"
        self.lru = self.lru[len(gone) :]
        self.names = {name: page for name, page in self.names.items() if page not in gone}
        assert len(set(pages)) == count and self._users().isdisjoint(pages)
        assert set(self.names.values()).isdisjoint(pages), "a page that still has a name was handed out to be written"
        assert all(self.pool.generations[page] == generations[page] + 1 for page in pages)
        return self._new_owner(pages)

    @rule(owner=held, index=st.integers(0, PAGES - 1), name=st.sampled_from(NAMES))
    def name(self, owner: int, index: int, name: bytes) -> None:
        pages = self.owners.get(owner, [])
        if index >= len(pages) or pages[index] in self.names.values():
            return
        assert self.pool.publish(pages[index], name) == (name not in self.names)
        self.names.setdefault(name, pages[index])

    @rule(target=held, names=st.lists(st.sampled_from(NAMES), max_size=4, unique=True))
    def share(self, names: list[bytes]) -> int:
        expected: list[int] = []
        for name in names:
            if name not in self.names:
                break
            expected.append(self.names[name])
        generations = list(self.pool.generations)
        assert self.pool.share(names) == expected
        assert self.pool.generations == generations, "a page that is shared has not changed hands"
        self.lru = [page for page in self.lru if page not in expected]
        return self._new_owner(expected)

    @rule(target=held, names=st.lists(st.sampled_from(NAMES), max_size=4, unique=True))
    def take_first(self, names: list[bytes]) -> int:
        unused = [name for name in names if name in self.names and self.names[name] not in self._users()]
        generations = list(self.pool.generations)
        page = self.pool.take_first(names)
        if not unused:
            assert page is None
            return self._new_owner([])
        assert page is not None and page == self.names.pop(unused[0]) and not self.pool.is_published(page)
        assert self.pool.generations[page] == generations[page] + 1, "who reads it sees that it has changed hands"
        self.lru.remove(page)
        return self._new_owner([page])

    @rule(owner=consumes(held))
    def free(self, owner: int) -> None:
        pages = self.owners.pop(owner)
        self.pool.free(pages)
        for page in reversed(pages):
            if page not in self._users() and page in self.names.values():
                self.lru.append(page)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.pool.check_integrity()
        assert self.pool.used_pages == len(self._users())
        assert self.pool.cached_pages == len(self.lru)
        assert self.pool.free_pages == PAGES - len(self._users())


class BestFitMachine(PagePoolMachine):
    """The same with the other policy."""

    allocation = "best-fit"


TestPagePool, TestBestFit = PagePoolMachine.TestCase, BestFitMachine.TestCase
TestPagePool.settings = TestBestFit.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)

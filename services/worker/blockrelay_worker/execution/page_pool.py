"""Which pages of a stage are whose: handed out by number and found again by name.

One page number names the same 16 positions of a request in every layer of the stage, so a request owns one list of
page numbers per stage. What lies in a page, and where, is the executor's business.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from blockrelay.errors import OutOfPages
from blockrelay_worker.execution.page_layout import PageLayout


class PagePool:
    """`pages` pages of one layout; ids are 0..pages-1. Not thread-safe: the engine loop owns the pool.

    A page is free, used (handed out, with a count of users) or cached: named, without a user, kept until its room is
    wanted. Who allocated a page may write it until it is named; from then on it is read-only, and found by `share`.
    Nothing is cleared when a page comes back.
    """

    def __init__(self, layout: PageLayout, pages: int) -> None:
        if pages < 1:
            raise ValueError("a page pool needs at least one page")
        self.layout = layout
        self.pages = pages
        # A stack: pages that were touched before are used again first, so that memory grows only when it must.
        self._free = list(range(pages - 1, -1, -1))
        self._users: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        #: How often a page was handed out anew. Other threads may read it: as long as it stays, so does a named page.
        self.generations = [0] * pages
        #: Called for every cached page that is given up.
        self.on_evict: Callable[[], None] = lambda: None

    @property
    def free_pages(self) -> int:
        """How many pages `allocate` can still give; cached pages count, because it takes them too."""
        return len(self._free) + len(self._cached)

    @property
    def used_pages(self) -> int:
        """How many pages have a user."""
        return len(self._users)

    @property
    def users(self) -> Mapping[int, int]:
        """How many users each used page has."""
        return self._users

    @property
    def cached_pages(self) -> int:
        """How many pages are kept without a user because they have a name."""
        return len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """`count` page ids, now owned by the caller alone. Raises OutOfPages and takes none if fewer are free.

        Cached pages are given up only when no page is free, least recently used first.
        """
        if count > self.free_pages:
            raise OutOfPages(f"{count} KV pages were asked for and {self.free_pages} of {self.pages} are free")
        while len(self._free) < count:
            self._evict()
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._users[page] = 1
            self.generations[page] += 1
        return taken

    def free(self, pages: Sequence[int]) -> None:
        """One user less for each page. The last one gone: a named page is cached, any other is free.

        `pages` in order of position: the later ones count as less recently used, since they are worth nothing without
        the earlier ones. Freeing more often than was allocated and shared is our bug: AssertionError.
        """
        for page in reversed(pages):
            assert page in self._users, f"page {page} is not handed out"
            self._users[page] -= 1
            if self._users[page]:
                continue
            del self._users[page]
            if page in self._name_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def name(self, page: int, name: bytes) -> bool:
        """Name a used page, whose positions are computed as far as the name says: read-only from now on.

        False when another page has the name already: then this one stays as it is, unnamed.
        """
        assert page in self._users and page not in self._name_of, f"page {page} cannot be named"
        if name in self._page_of:
            return False
        self._page_of[name], self._name_of[page] = page, name
        return True

    def unname(self, page: int) -> None:
        """Nobody finds a used page any more, if anybody did: what it holds is not what its name says."""
        assert page in self._users, f"page {page} is not handed out"
        if (name := self._name_of.pop(page, None)) is not None:
            del self._page_of[name]

    def is_named(self, page: int) -> bool:
        return page in self._name_of

    def share(self, names: Sequence[bytes]) -> list[int]:
        """Pages of the longest known beginning of `names`, one user more for each; to be given back with `free`."""
        pages: list[int] = []
        for name in names:
            page = self._page_of.get(name)
            if page is None:
                break
            self._cached.pop(page, None)
            self._users[page] = self._users.get(page, 0) + 1
            pages.append(page)
        return pages

    def take_first(self, names: Sequence[bytes]) -> int | None:
        """The page of the first of these names that has one which nobody uses: the caller's alone from now on, who may
        write it; it has no name any more."""
        for name in names:
            page = self._page_of.get(name)
            if page is not None and page not in self._users:
                del self._cached[page], self._page_of[self._name_of.pop(page)]
                self._users[page] = 1
                self.generations[page] += 1
                return page
        return None

    def check_integrity(self) -> None:
        """Every page is free, cached or used, once. Raises AssertionError; meant for idle time and tests."""
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert self._users.keys().isdisjoint(self._free), "a page is free and used"
        assert self._cached.keys().isdisjoint(self._free), "a page is free and cached"
        assert self._users.keys().isdisjoint(self._cached), "a page is cached and used"
        assert len(self._free) + len(self._users) + len(self._cached) == self.pages, "a page is lost"
        assert all(users > 0 for users in self._users.values()), "a page is not in use"
        assert {page: name for name, page in self._page_of.items()} == self._name_of, "names and pages disagree"
        assert self._name_of.keys().isdisjoint(self._free), "a free page has a name"
        assert self._cached.keys() <= self._name_of.keys(), "a cached page has no name"

    def _evict(self) -> None:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._name_of.pop(page)]
        self._free.append(page)
        self.on_evict()

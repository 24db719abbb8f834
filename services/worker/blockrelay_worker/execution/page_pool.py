"""The accounting of the KV pages of a stage: pages are allocated by number and found again by block hash.

One page number stands for the same 16 positions of a request in every layer of the stage, so a request has one list
of page numbers per stage. The executor holds the contents of the pages.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from blockrelay.errors import OutOfPages
from blockrelay.settings.worker import PageAllocation
from blockrelay_worker.execution.free_pages import FirstFit, FreePages, free_pages
from blockrelay_worker.execution.page_layout import PageLayout


class PagePool:
    """Allocator and prefix cache of `pages` pages of one layout; ids are 0..pages-1.

    Not thread-safe: the engine loop owns the pool.

    A page is free, used (with a reference count) or cached: it has a block hash and no user, and is kept until its
    room is needed. The owner of a page may write it until it gets its block hash (`publish`); from then on it is
    read-only, and `share` finds it. A freed page keeps its old contents.
    """

    def __init__(self, layout: PageLayout, pages: int) -> None:
        """All pages are free at first. Raises ValueError if `pages` is less than 1."""
        if pages < 1:
            raise ValueError("a page pool needs at least one page")
        self.layout = layout
        self.pages = pages
        self._free: FreePages = FirstFit(range(pages))
        self._users: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        #: Number of times that each page was allocated, or taken by `take_first`. Other threads may read it: while a
        #: page's number stays the same, a page with a block hash keeps its contents.
        self.generations = [0] * pages
        #: Called for every cached page that is evicted.
        self.on_evict: Callable[[], None] = lambda: None

    def use(self, allocation: PageAllocation) -> None:
        """Gives out free pages by this policy from now on."""
        self._free = free_pages(self._free.numbers(), allocation)

    @property
    def free_pages(self) -> int:
        """Number of pages that `allocate` can still give; cached pages count, because it evicts them."""
        return len(self._free) + len(self._cached)

    @property
    def used_pages(self) -> int:
        """Number of pages with a user."""
        return len(self._users)

    @property
    def touched_pages(self) -> int:
        """Number of pages that were used at least once: the system gives a page its memory then. Any thread may ask."""
        return self.pages - self.generations.count(0)

    @property
    def users(self) -> Mapping[int, int]:
        """Number of users of each used page, by page id."""
        return self._users

    @property
    def cached_pages(self) -> int:
        """Number of pages without a user that are kept for their block hash."""
        return len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Returns `count` page ids that only the caller uses. Raises OutOfPages, taking none, if fewer are free.

        Cached pages are evicted only when no page is free, least recently used first.
        """
        if count > self.free_pages:
            raise OutOfPages(f"{count} KV pages were requested and {self.free_pages} of {self.pages} are free")
        while len(self._free) < count:
            self._evict()
        taken = self._free.take(count)
        for page in taken:
            self._users[page] = 1
            self.generations[page] += 1
        return taken

    def free(self, pages: Sequence[int]) -> None:
        """Removes one user of each page. A page without users is cached if it has a block hash, and free otherwise.

        `pages` are in order of position: later ones count as less recently used, since they are worthless without the
        earlier ones. Raises AssertionError for a page that has no user.
        """
        for page in reversed(pages):
            assert page in self._users, f"page {page} is not allocated"
            self._users[page] -= 1
            if self._users[page]:
                continue
            del self._users[page]
            if page in self._hash_of:
                self._cached[page] = None
            else:
                self._free.give(page)

    def publish(self, page: int, block_hash: bytes) -> bool:
        """Publishes a used page under the hash of the tokens whose KV it holds; it is read-only from now on.

        Returns False when another page has this block hash: then the page stays unpublished. Raises AssertionError for
        a page that has no user or has a block hash already.
        """
        assert page in self._users and page not in self._hash_of, f"page {page} cannot be published"
        if block_hash in self._page_of:
            return False
        self._page_of[block_hash], self._hash_of[page] = page, block_hash
        return True

    def unpublish(self, page: int) -> None:
        """Removes the block hash of a used page, if it has one: its contents are not what the hash promises.

        Raises AssertionError for a page that has no user.
        """
        assert page in self._users, f"page {page} is not allocated"
        if (block_hash := self._hash_of.pop(page, None)) is not None:
            del self._page_of[block_hash]

    def is_published(self, page: int) -> bool:
        """Returns whether the page has a block hash."""
        return page in self._hash_of

    def share(self, hashes: Sequence[bytes]) -> list[int]:
        """Returns the pages of the longest known prefix of `hashes`, each with one more user; `free` removes it."""
        pages: list[int] = []
        for block_hash in hashes:
            page = self._page_of.get(block_hash)
            if page is None:
                break
            self._cached.pop(page, None)
            self._users[page] = self._users.get(page, 0) + 1
            pages.append(page)
        return pages

    def take_first(self, hashes: Sequence[bytes]) -> int | None:
        """Takes the first cached page with one of these block hashes out of the cache; None if there is none.

        The caller is its only user and may write it; its block hash is removed.
        """
        for block_hash in hashes:
            page = self._page_of.get(block_hash)
            if page is not None and page not in self._users:
                del self._cached[page], self._page_of[self._hash_of.pop(page)]
                self._users[page] = 1
                self.generations[page] += 1
                return page
        return None

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is exactly one of free, cached and used. For idle time and tests."""
        free = self._free.numbers()
        assert len(set(free)) == len(free) == len(self._free), "a page is free twice"
        assert self._users.keys().isdisjoint(free), "a page is free and used"
        assert self._cached.keys().isdisjoint(free), "a page is free and cached"
        assert self._users.keys().isdisjoint(self._cached), "a page is cached and used"
        assert len(self._free) + len(self._users) + len(self._cached) == self.pages, "a page is lost"
        assert all(users > 0 for users in self._users.values()), "a page is not in use"
        assert {page: each for each, page in self._page_of.items()} == self._hash_of, "hashes and pages disagree"
        assert self._hash_of.keys().isdisjoint(free), "a free page has a block hash"
        assert self._cached.keys() <= self._hash_of.keys(), "a cached page has no block hash"

    def _evict(self) -> None:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._hash_of.pop(page)]
        self._free.give(page)
        self.on_evict()

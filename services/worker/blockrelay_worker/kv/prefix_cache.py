"""Known beginnings: a run takes the pages that hold its first tokens already, and names those that it fills itself.

Only in precisions marked exact: there a page's bits are a function of what its name says.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from blockrelay.observability.metrics import WorkerMetrics
from blockrelay_worker.execution.page_pool import PagePool
from blockrelay_worker.kernels.specification import PAGE
from blockrelay_worker.kv.page_names import extend_names, root_name
from blockrelay_worker.kv.store.store import Load, Loaded, PageStore


class Prefix(Protocol):
    """A run as the cache sees it: its tokens, and its pages, which the cache hands out and names."""

    pages: list[int]
    names: list[bytes]
    sealed: int
    computed: int
    cached: int
    loading: Load | None

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def salt(self) -> str: ...
    @property
    def reusable(self) -> int: ...
    @property
    def preemptions(self) -> int: ...


class PrefixCache:
    """What one worker knows about pages. Used by the engine thread only.

    What is asked for and found is counted in vLLM's way: tokens, once per request (preempted ones not again), and by
    the one stage of a route that `counts`. With a `store`, pages that the pool has not are looked for there: then
    `deliver` is called with the Loaded, from another thread, and brings it to `RunTable.loaded`.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        model_hash: str,
        numerics: str,
        metrics: WorkerMetrics,
        counts: bool = True,
        store: PageStore | None = None,
        deliver: Callable[[Loaded], None] = lambda done: None,
    ) -> None:
        self._pool, self._metrics, self._counts = pool, metrics, counts
        self._store, self._deliver = store, deliver
        self._model_hash, self._numerics = model_hash, numerics
        pool.on_evict = metrics.prefix_cache_evictions.inc

    def attach(self, run: Prefix, exactly: int | None) -> None:
        """See `RunTable.adopt`."""
        pages = (run.reusable if exactly is None else exactly) // PAGE
        self._extend(run, pages)
        run.pages = self._pool.share(run.names[:pages])
        run.sealed = len(run.pages)
        run.computed = run.sealed * PAGE
        if self._counts and not run.preemptions:
            self._metrics.prefix_cache_queries.inc(len(run.tokens))
        self._count(run, run.computed)
        self._look_further(run, run.names[run.sealed : pages])

    def take(self, run: Prefix, done: Loaded) -> None:
        """The load that `run` waited for has ended: it has the pages that were found."""
        first = len(run.pages) - len(done.load.pages)
        for index in range(first, first + done.count):
            self._pool.name(run.pages[index], run.names[index])
        rest = run.pages[first + done.count :]
        del run.pages[first + done.count :]
        self._pool.free(rest)  # they are allocated again when rows come to them
        run.loading = None
        run.sealed += done.count
        run.computed = run.sealed * PAGE
        self._count(run, done.count * PAGE)

    def settle(self) -> None:
        """Wait until nobody but the engine writes into pages."""
        if self._store is not None:
            self._store.settle()

    def seal(self, run: Prefix, tokens: int) -> None:
        """Name the run's full pages within the first `tokens` tokens, which are known and computed."""
        full = tokens // PAGE
        if full <= run.sealed:
            return
        self._extend(run, full)
        for index in range(run.sealed, full):
            page, name = run.pages[index], run.names[index]
            if self._pool.name(page, name) and self._store is not None:
                self._store.put(page, name)
        run.sealed = full

    def _extend(self, run: Prefix, pages: int) -> None:
        root = root_name(salt=run.salt, model_hash=self._model_hash, numerics=self._numerics)
        extend_names(run.names, root, run.tokens, pages)

    def _look_further(self, run: Prefix, names: list[bytes]) -> None:
        """Let the store fill pages for `names`, which follow those that the run has, if it may have them."""
        room = min(len(names), self._pool.free_pages)
        if self._store is None or not room or not self._store.may_have(names[0]):
            return
        pages = self._pool.allocate(room)
        run.pages += pages
        run.loading = Load(tuple(names[:room]), tuple(pages))
        self._store.load(run.loading, self._deliver)

    def _count(self, run: Prefix, found: int) -> None:
        if run.preemptions:
            return
        run.cached += found
        if self._counts:
            self._metrics.prefix_cache_hits.inc(found)

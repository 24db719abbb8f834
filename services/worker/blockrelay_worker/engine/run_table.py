"""The runs that are on this worker: the only owner of what changes while a request runs here."""

import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from blockrelay_worker.engine.run import Run
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.execution.page_pool import PagePool
from blockrelay_worker.kv.prefix_cache import PrefixCache
from blockrelay_worker.kv.store.store import Load, Loaded

P = ParamSpec("P")
T = TypeVar("T")


def _timed(
    method: Callable[Concatenate["RunTable", P], T],
) -> Callable[Concatenate["RunTable", P], T]:
    """Adds what the call takes to `RunTable.cache_seconds`. Such methods do not call each other."""

    @wraps(method)
    def timed(table: "RunTable", *arguments: P.args, **named: P.kwargs) -> T:
        started = time.perf_counter()
        try:
            return method(table, *arguments, **named)
        finally:
            table.cache_seconds += time.perf_counter() - started

    return timed


class RunTable:
    """request id -> Run, and the page pool they share. Used by the engine thread only, except `view`.

    Without `cache` no page is ever named, found or kept.
    """

    def __init__(self, pool: PagePool, cache: PrefixCache | None = None) -> None:
        self.pool = pool
        self._cache = cache
        #: Loads whose run has gone: their pages come back when nobody writes them any more.
        self._orphans: set[Load] = set()
        self._runs: dict[str, Run] = {}
        #: request -> run, replaced as a whole on every change: other threads may read it without a lock.
        self.view: dict[str, str] = {}
        #: Spent on KV pages since somebody set it to 0.
        self.cache_seconds = 0.0

    def __len__(self) -> int:
        return len(self._runs)

    def all(self) -> list[Run]:
        return list(self._runs.values())

    def get(self, request: str, run_id: str) -> Run | None:
        """The run, if exactly this one is here."""
        run = self._runs.get(request)
        return run if run is not None and run.id == run_id else None

    def add(self, run: Run) -> None:
        """Put a run on the table; an older run of the same request is dropped."""
        self._drop_request(run.request)
        self._runs[run.request] = run
        self.view = {r.request: r.id for r in self._runs.values()}

    @_timed
    def drop(self, request: str, run_id: str) -> bool:
        """Forget a run and free its pages. False when it is not here (any more)."""
        if self.get(request, run_id) is None:
            return False
        self._drop_request(request)
        return True

    def clear(self) -> None:
        for request in list(self._runs):
            self._drop_request(request)
        if self._orphans and self._cache is not None:
            self._cache.settle()
            for load in list(self._orphans):
                self._free_orphan(load)

    @property
    def free_pages(self) -> int:
        """How many pages runs can still get."""
        return self.pool.free_pages

    @_timed
    def grow(self, run: Run, tokens: int) -> bool:
        """Make the run's pages cover `tokens` tokens. False, changing nothing, when the pool has too few free pages."""
        lacking = pages_for(tokens) - len(run.kv.pages)
        if lacking > self.pool.free_pages:
            return False
        if lacking > 0:
            run.kv.pages += self.pool.allocate(lacking)
        return True

    @_timed
    def adopt(self, run: Run, *, exactly: int | None = None) -> None:
        """Give a run without pages the longest known beginning of its tokens, which is then computed.

        Whole pages, at most `run.reusable` tokens. A later stage wants `exactly` as many tokens as its first rows'
        position says, and has them afterwards if run.computed says so. Either may have to wait for a tier of the page
        store first: until `loaded`, run.kv.loading is set.
        """
        run.kv.searched = True
        if exactly and not self.pool.layout.layers:
            run.kv.adopt_nothing(exactly)  # the head alone
        elif self._cache is not None and run.identity.reusable_limit != 0:
            self._cache.attach(run, exactly)

    def is_loading(self, request: str) -> bool:
        """Whether the request's run waits for a tier."""
        run = self._runs.get(request)
        return run is not None and run.kv.loading is not None

    @_timed
    def loaded(self, done: Loaded) -> None:
        """A load has ended: its run goes on behind what was found, or its pages are free."""
        if done.load in self._orphans:
            self._free_orphan(done.load)
        for run in self._runs.values():
            if run.kv.loading is done.load and self._cache is not None:
                self._cache.take(run, done)

    @_timed
    def seal(self, run: Run, known: int | None = None) -> None:
        """Name the pages that are full by now, so that others find them.

        `known`: how many leading tokens of run.tokens are no drafts (default: all).
        """
        if self._cache is not None and run.params.use_cache:
            self._cache.seal(run, min(run.computed, len(run.tokens) if known is None else known))

    @_timed
    def distrust(self, run: Run, tokens: int) -> None:
        """Take the pages behind the first `tokens` of the run, which hold wrong numbers, out of the prefix cache."""
        if self._cache is not None:
            self._cache.distrust(run, tokens)
        else:
            run.kv.distrust(tokens)

    def export(self, run: Run, timeout_s: float) -> None:
        """Write the pages of a private run for who goes on with its request elsewhere, the last one as far as it is
        computed, and wait for that."""
        if self._cache is not None and run.params.use_cache:
            self._cache.export(run, timeout_s)

    @_timed
    def preempt(self, run: Run) -> None:
        """Take the pages of a run that stays on the table; those with a name can be found again."""
        self._release(run)
        run.kv.searched = False
        run.kv.preemptions += 1
        if run.last is not None:
            run.last.logits.clear()

    def check_integrity(self) -> None:
        """Every page in use belongs to the runs that are its users. AssertionError otherwise (our bug)."""
        owned = Counter(page for run in self._runs.values() for page in run.kv.pages)
        owned.update(page for load in self._orphans for page in load.pages)
        assert owned == self.pool.users, "pages are in use without a run, or by a run that does not have them"
        self.pool.check_integrity()

    def _drop_request(self, request: str) -> None:
        run = self._runs.pop(request, None)
        if run is None:
            return
        if self._cache is not None and run.params.use_cache:
            self._cache.leave(run)
        self._release(run)
        self.view = {r.request: r.id for r in self._runs.values()}

    def _release(self, run: Run) -> None:
        pages, load = run.kv.release()
        if load is not None:  # somebody writes into its pages
            self._orphans.add(load)
        self.pool.free(pages)

    def _free_orphan(self, load: Load) -> None:
        self._orphans.remove(load)
        self.pool.free(load.pages)

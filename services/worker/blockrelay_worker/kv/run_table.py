"""The run table: the runs on this worker, and the KV pages that they hold."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.execution.page_pool import PagePool
from blockrelay_worker.kv.prefix_cache import PrefixCache
from blockrelay_worker.runs.kv_load import KvLoad, Loaded
from blockrelay_worker.runs.run import Run

P = ParamSpec("P")
T = TypeVar("T")


def _timed(
    method: Callable[Concatenate["RunTable", P], T],
) -> Callable[Concatenate["RunTable", P], T]:
    """Adds the seconds of each call to `RunTable.cache_seconds`. Decorated methods must not call each other."""

    @wraps(method)
    def timed(table: "RunTable", *arguments: P.args, **named: P.kwargs) -> T:
        started = time.perf_counter()
        try:
            return method(table, *arguments, **named)
        finally:
            table.cache_seconds += time.perf_counter() - started

    return timed


class RunTable:
    """The runs of this worker by request id, and their page pool. Used by the engine thread only, except `view`.

    Without `cache` no page is published or reused.
    """

    def __init__(self, pool: PagePool, cache: PrefixCache | None = None) -> None:
        self.pool = pool
        self._cache = cache
        #: Loads whose run has gone: their pages are freed when the page store has stopped writing to them.
        self._orphans: set[KvLoad] = set()
        self._runs: dict[str, Run] = {}
        #: Run id by request id, replaced as a whole on every change: other threads may read it without a lock.
        self.view: dict[str, str] = {}
        #: Seconds spent on KV pages since the engine last set this to 0.
        self.cache_seconds = 0.0

    def __len__(self) -> int:
        return len(self._runs)

    def all(self) -> list[Run]:
        """Returns all runs, in the order in which they were added: oldest first."""
        return list(self._runs.values())

    def get(self, request_id: str, run_id: str) -> Run | None:
        """Returns the run; None if it is not here, or if another run of the request is."""
        run = self._runs.get(request_id)
        return run if run is not None and run.run_id == run_id else None

    def add(self, run: Run) -> None:
        """Adds a run; an older run of the same request is removed, and its pages are freed."""
        self._drop_request(run.request_id)
        self._runs[run.request_id] = run
        self.view = {r.request_id: r.run_id for r in self._runs.values()}

    @_timed
    def drop(self, request_id: str, run_id: str, *, again: bool = False) -> bool:
        """Removes a run and frees its pages; if its request runs `again`, the page store holds them. False if it is
        not here."""
        run = self.get(request_id, run_id)
        if run is None:
            return False
        if again and self._cache is not None and run.params.use_cache:
            self._cache.hold(run, for_next=True)
        self._drop_request(request_id)
        return True

    def clear(self) -> None:
        """Removes all runs and frees all pages; waits for loads of the page store that are under way."""
        for request_id in list(self._runs):
            self._drop_request(request_id)
        if self._orphans and self._cache is not None:
            self._cache.settle()
            for load in list(self._orphans):
                self._free_orphan(load)

    @_timed
    def grow(self, run: Run, tokens: int) -> bool:
        """Gives the run pages for its first `tokens` tokens. False, changing nothing, if too few pages are free."""
        lacking = pages_for(tokens) - len(run.kv.pages)
        if lacking > self.pool.free_pages:
            return False
        if lacking > 0:
            run.kv.pages += self.pool.allocate(lacking)
        return True

    @_timed
    def attach_prefix(self, run: Run, *, exactly: int | None = None) -> None:
        """Gives a run without pages those of the longest cached prefix of its tokens, at most `run.reusable` tokens.

        A later stage asks for `exactly` as many tokens as its first row's position; `run.computed` tells afterwards
        how many it got. If pages must come first from the page store, or from KV that the client supplied,
        run.kv.loading is set until `loaded` is called.
        """
        run.kv.searched = True
        if exactly and not self.pool.layout.layers:
            run.kv.count_reused(exactly)  # a stage with the head alone has no KV
        elif self._cache is not None and run.reusable_limit != 0:
            self._cache.attach(run, exactly)

    def names(self, run: Run) -> Sequence[bytes]:
        """Names (block hashes) by which other requests find the leading pages of a run; empty if they find none."""
        return () if self._cache is None else self._cache.names(run)

    @_timed
    def catch_up(self, run: Run) -> None:
        """Gives a run that has computed no row yet the pages of its prefix that were published meanwhile."""
        if self._cache is not None and run.kv.takes_pages:
            self._cache.catch_up(run)

    @_timed
    def loaded(self, done: Loaded) -> None:
        """Takes the result of a load: its run goes on behind the pages it got; without a run the pages are freed."""
        if done.load in self._orphans:
            self._free_orphan(done.load)
        for run in self._runs.values():
            if run.kv.loading is done.load and self._cache is not None:
                self._cache.take(run, done)

    @_timed
    def publish(self, run: Run, known: int | None = None) -> None:
        """Publishes the run's full pages to the prefix cache; none if its parameters turn the cache off.

        `known`: number of leading tokens of run.tokens that are no drafts (default: all).
        """
        if self._cache is not None and run.params.use_cache:
            self._cache.publish(run, min(run.computed, len(run.tokens) if known is None else known))

    @_timed
    def distrust(self, run: Run, tokens: int) -> None:
        """Withdraws the KV behind the run's first `tokens` tokens, which is wrong, so that no later run reuses it.

        `run.computed` falls to `tokens`, if it was more. The run keeps its pages; those behind these tokens, and one
        that they fill only in part, leave the prefix cache.
        """
        if self._cache is not None:
            self._cache.distrust(run, tokens)
        else:
            run.kv.distrust(tokens)

    def export(self, run: Run, timeout_s: float) -> None:
        """Has the page store hold the pages of a private run, for the next run of its request on another worker.

        Writes the last page, as far as it is computed; full ones were queued when they were published. Waits at most
        `timeout_s` seconds for all of them, and not at all if the last page is full. Does nothing if the run's
        parameters turn the cache off.
        """
        if self._cache is not None and run.params.use_cache:
            self._cache.export(run, timeout_s)

    @_timed
    def preempt(self, run: Run) -> None:
        """Takes all pages from a run that stays on the table; published ones may be reused later.

        None of its tokens counts as computed then. The logits that a tensor step has collected are dropped. The page
        store holds the pages until the run goes on.
        """
        if self._cache is not None and run.params.use_cache:
            self._cache.hold(run)
        self._release(run)
        run.kv.searched = False
        run.kv.preemptions += 1
        if run.last is not None:
            run.last.logits.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page in use belongs to exactly the runs and loads that use it."""
        owned = Counter(page for run in self._runs.values() for page in run.kv.pages)
        owned.update(page for load in self._orphans for page in load.pages)
        assert owned == self.pool.users, "pages are in use without a run, or by a run that does not have them"
        self.pool.check_integrity()

    def _drop_request(self, request_id: str) -> None:
        run = self._runs.pop(request_id, None)
        if run is None:
            return
        if self._cache is not None and run.params.use_cache:
            self._cache.leave(run)
            self._cache.let_go(run)
        self._release(run)
        self.view = {r.request_id: r.run_id for r in self._runs.values()}

    def _release(self, run: Run) -> None:
        pages, load = run.kv.release()
        if load is not None:  # the page store still writes into its pages
            self._orphans.add(load)
        self.pool.free(pages)

    def _free_orphan(self, load: KvLoad) -> None:
        self._orphans.remove(load)
        self.pool.free(load.pages)

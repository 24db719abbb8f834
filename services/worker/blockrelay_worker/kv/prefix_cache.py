"""Known beginnings: a run takes the pages that hold its first tokens already, and names those that it fills itself.

In precisions marked exact a page's bits are a function of what its name says, and any run takes it. Behind a device
that varies pages are private: only later runs of the same request take them, at the stand-in of that device too. In the
pool of one worker later steps of the same session take them as well, behind the same workers of the stages before; and
where it is allowed, on a worker that has the whole model, any request of equal salt: by local names, which no tier of
the store ever hears. There every page has its private name all the same.

A step begins behind what the first stage has, and each later stage has as much or says how much it has: then the step
runs again behind that (RERUN, `found`).
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Protocol

from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay_worker.execution.page_pool import PagePool
from blockrelay_worker.kernels.specification import PAGE
from blockrelay_worker.kv.page_names import (
    begun_page_name,
    extend_names,
    local_root_name,
    private_root_name,
    root_name,
)
from blockrelay_worker.kv.state import KvState
from blockrelay_worker.kv.store.given import Given
from blockrelay_worker.kv.store.store import Load, Loaded, PageStore


class Prefix(Protocol):
    """A run as the cache sees it: what it begins with, and the pages that the cache finds and names for it."""

    @property
    def kv(self) -> KvState: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def request(self) -> str: ...
    @property
    def route(self) -> tuple[str, ...]:
        """The worker of each stage."""
        ...

    @property
    def private(self) -> bool:
        """Its pages are not what its tokens decide: runs of the same request share them, and steps of its session."""
        ...

    @property
    def given_pages(self) -> int:
        """Of so many leading pages its client has given the KV."""
        ...

    @property
    def salt(self) -> str:
        """Runs with another salt share nothing."""
        ...

    @property
    def session(self) -> str:
        """Of which it is a step; "": of none."""
        ...

    @property
    def reusable(self) -> int:
        """How many leading tokens may be found."""
        ...

    @property
    def limited(self) -> bool:
        """Somebody has said how far the run before it came."""
        ...


class PrefixCache:
    """What one worker knows about pages. Used by the engine thread only.

    What is asked for and found is counted in vLLM's way: tokens, once per request (preempted ones not again, private
    ones only where they share), and by the first stage of a route. With a `store`, pages that the pool has
    not are looked for there: then `deliver` is called with the Loaded, from another thread, and brings it to
    `RunTable.loaded`.
    Where bits are not `exact` only private runs are given pages, and their pages named. `shares_private`: private runs
    of equal salt find each other's pages in this pool, and not those of one session alone. `stage` is the worker's.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        model_hash: str,
        numerics: str,
        metrics: WorkerMetrics,
        exact: bool = True,
        stage: int = 0,
        shares_private: bool = False,
        store: PageStore | None = None,
        deliver: Callable[[Loaded], None] = lambda done: None,
    ) -> None:
        self._pool, self._metrics, self._exact, self._counts = pool, metrics, exact, stage == 0
        self._store, self._deliver = store, deliver
        self._stage, self._shares_private = stage, shares_private
        self._life = secrets.token_hex(16)
        self._model_hash, self._numerics = model_hash, numerics
        pool.on_evict = metrics.prefix_cache_evictions.inc

    def attach(self, run: Prefix, exactly: int | None) -> None:
        """See `RunTable.adopt`."""
        if not (self._exact or run.private):
            return
        kv, wanted = run.kv, run.reusable if exactly is None else exactly
        pages, rest = divmod(wanted, PAGE)
        self._extend(run, pages)
        local = self._pool.share(self._local(run, pages))
        kv.adopt(local + self._pool.share(kv.names[len(local) : pages]), len(local))
        if self._store is not None:
            for page, name in zip(local, kv.names, strict=False):  # a stand-in finds them by the name of this request
                self._store.put(page, name)
        if self._counts and not kv.preemptions and self._shares(run):
            self._metrics.prefix_cache_queries.inc(len(run.tokens))
        names, begun = kv.names[kv.sealed : pages], 0
        if rest and run.private and (exactly is not None or run.limited):
            candidates = self._begun_names(run, pages, rest)
            if not names and (page := self._pool.take_first(candidates)) is not None:
                kv.adopt_begun(page, rest)
            elif self._store is not None and (name := next(filter(self._store.may_have, candidates), None)):
                names, begun = [*names, name], rest
        self._count(run, kv.computed)
        given = Given(run.request, kv.sealed, run.given_pages) if kv.sealed < run.given_pages else None
        self._look_further(kv, names, begun, given)

    def take(self, run: Prefix, done: Loaded) -> None:
        """The load that `run` waited for has ended: it has the pages that were found."""
        kv, before = run.kv, run.kv.computed
        first, full = kv.sealed, done.count - (done.load.begun > 0 and done.count == len(done.load.names))
        for index in range(first, first + full):
            self._pool.name(kv.pages[index], kv.names[index])
        self._pool.free(kv.loaded(done.count))  # the rest is allocated again when rows come to it
        self._count(run, kv.computed - before)

    def settle(self) -> None:
        """Wait until nobody but the engine writes into pages."""
        if self._store is not None:
            self._store.settle()

    def seal(self, run: Prefix, tokens: int) -> None:
        """Name the run's full pages within the first `tokens` tokens, which are known and computed."""
        kv, full = run.kv, tokens // PAGE
        if full <= kv.sealed or not (self._exact or run.private):
            return
        self._extend(run, full)
        # Behind pages of another worker, which have none, no page gets a local name.
        local = self._local(run, full) if kv.shared == kv.sealed else []
        for index in range(kv.sealed, full):
            page, name = kv.pages[index], kv.names[index]
            if local:
                named = self._pool.name(page, local[index]) or self._pool.name(page, name)
            else:
                named = self._pool.name(page, name)
            if named and self._store is not None:
                self._store.put(page, name)
        kv.seal(full, full if local else kv.shared)

    def distrust(self, run: Prefix, tokens: int) -> None:
        """See `RunTable.distrust`."""
        names = run.kv.names
        spoiled = run.kv.distrust(tokens)
        for index in spoiled:
            self._pool.unname(run.kv.pages[index])
        if self._store is not None and spoiled:
            self._store.discard([names[index] for index in spoiled])

    def _local(self, run: Prefix, pages: int) -> list[bytes]:
        """Names by which other requests find the first pages here; none where they may not, nor of one whose client
        gives it KV."""
        if not run.private or run.given_pages or not self._shares(run):
            return []
        session, behind = "" if self._shares_private else run.session, run.route[: self._stage]
        root = local_root_name(
            life=self._life, salt=run.salt, model_hash=self._model_hash, session=session, behind=behind
        )
        extend_names(run.kv.local, root, run.tokens, pages)
        return run.kv.local[:pages]

    def _shares(self, run: Prefix) -> bool:
        """Runs of other requests may take its pages."""
        return not run.private or self._shares_private or bool(run.session)

    def leave(self, run: Prefix) -> bool:
        """Name the page that a private run has begun, and that it writes no more, so that the next run of its request
        takes it. False where there is none, or it has its name."""
        kv = run.kv
        full, rest = divmod(kv.computed, PAGE)
        if not run.private or not rest or full != kv.sealed or full >= len(kv.pages):
            return False
        if self._pool.is_named(kv.pages[full]):
            return False
        (name, *_) = self._begun_names(run, full, rest)
        return self._pool.name(kv.pages[full], name)

    def export(self, run: Prefix, timeout_s: float) -> None:
        """Write what a private run has come to, to its last row, and wait for that."""
        if self.leave(run) and self._store is not None:
            full, rest = divmod(run.kv.computed, PAGE)
            self._store.put(run.kv.pages[full], self._begun_names(run, full, rest)[0])
            self._store.flush(timeout_s)

    def _begun_names(self, run: Prefix, full: int, rest: int) -> list[bytes]:
        """Of the page behind `full` pages, if it holds `rest` tokens, or as many more of the run's: whoever has come
        further has these too."""
        self._extend(run, min(full + 1, len(run.tokens) // PAGE))
        names, tokens = run.kv.names, run.tokens[full * PAGE : (full + 1) * PAGE]
        before = names[full - 1] if full else self._root(run)
        begun = [begun_page_name(before, tokens[:n]) for n in range(rest, min(len(tokens), PAGE - 1) + 1)]
        return begun + names[full : full + 1]

    def _root(self, run: Prefix) -> bytes:
        if run.private:
            return private_root_name(request=run.request, model_hash=self._model_hash)
        return root_name(salt=run.salt, model_hash=self._model_hash, numerics=self._numerics)

    def _extend(self, run: Prefix, pages: int) -> None:
        extend_names(run.kv.names, self._root(run), run.tokens, pages)

    def _look_further(self, kv: KvState, names: list[bytes], begun: int, given: Given | None) -> None:
        """Let the store fill pages for `names`, which follow those that the run has, if it may have them. The last one
        is of a page with `begun` tokens, unless that is 0."""
        room = min(len(names), self._pool.free_pages)
        if self._store is None or not room or not (given or self._store.may_have(names[0])):
            return
        last = begun if room == len(names) else 0
        load = Load(tuple(names[:room]), tuple(self._pool.allocate(room)), last, given)
        kv.wait_for(load)
        self._store.load(load, self._deliver)

    def _count(self, run: Prefix, found: int) -> None:
        if run.kv.preemptions:
            return
        run.kv.cached += found
        if self._counts and self._shares(run):
            self._metrics.prefix_cache_hits.inc(found)

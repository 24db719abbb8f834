"""The prefix cache: a run reuses KV pages that hold its first tokens, and publishes the pages that it fills.

In precisions marked exact a page's block hash decides its bits, and any run may reuse it. Pages of a
nondeterministic device are private: only later runs of the same request reuse them, on the device's CPU stand-in too.
Within the pool of one worker, later steps of the same session reuse them as well, behind the same workers of the
earlier stages. If inexact sharing is allowed and the worker has the whole model, any request of equal salt does. This
goes by local hashes, which never reach the page store; each such page has its private hash too.

A run starts behind the tokens whose pages the first stage has. If a later stage has fewer, it says how many, and the
request runs again from there (the argument `found` of RERUN).
"""

import secrets
from collections.abc import Callable, Sequence

from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay_worker.execution.page_pool import PagePool
from blockrelay_worker.kernels.specification import PAGE
from blockrelay_worker.kv.block_hashes import (
    extend_hashes,
    local_root_hash,
    partial_page_hash,
    private_root_hash,
    root_hash,
)
from blockrelay_worker.kv.store.store import PageStore
from blockrelay_worker.runs.kv_load import KvLoad, Loaded, SuppliedKv
from blockrelay_worker.runs.kv_state import KvState
from blockrelay_worker.runs.run import Run


class PrefixCache:
    """The prefix cache of one worker. Used by the engine thread only.

    Queries and hits are counted as vLLM does: in tokens, once per request (not again after preemption, and private
    requests only if they share), and by the first stage of a route only. With a `store`, pages that the pool lacks are
    looked up there: then `deliver` is called with the Loaded, from another thread, and must bring it to
    `RunTable.loaded`.
    Unless `exact`, only private runs reuse and publish pages. `shares_private`: private runs of equal salt, and not
    only those of one session, reuse each other's pages in this pool. `stage` is the worker's, from 0. `numerics` is
    the numerics id of its executor. Sets `pool.on_evict`.
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
        self._pool_id = secrets.token_hex(16)
        self._model_hash, self._numerics = model_hash, numerics
        pool.on_evict = metrics.prefix_cache_evictions.inc

    def attach(self, run: Run, exactly: int | None) -> None:
        """Gives a run without pages those of its longest prefix in the pool, and starts to load the next ones.

        While they are loaded from the store, or from KV that the client supplied, `run.kv.loading` is set.

        The first stage passes None for `exactly`: the prefix has at most `run.reusable` tokens. A later stage passes
        the position of the run's first row: the prefix has as many tokens, or fewer if pages are missing. No page is
        given if the cache is not exact and the run not private.
        """
        if not (self._exact or run.private):
            return
        kv, wanted = run.kv, run.reusable if exactly is None else exactly
        pages, rest = divmod(wanted, PAGE)
        self._extend(run, pages)
        local = self._pool.share(self._local(run, pages))
        kv.attach(local + self._pool.share(kv.hashes[len(local) : pages]), len(local))
        if self._store is not None:
            for page, block_hash in zip(local, kv.hashes, strict=False):
                self._store.put(page, block_hash)  # a stand-in looks them up by this request's names
        if self._counts and not kv.preemptions and self._shares(run):
            self._metrics.prefix_cache_queries.inc(len(run.tokens))
        hashes, partial_tokens = kv.hashes[kv.published : pages], 0
        if rest and run.private and (exactly is not None or run.reusable_limit is not None):
            candidates = self._partial_hashes(run, pages, rest)
            if not hashes and (page := self._pool.take_first(candidates)) is not None:
                kv.attach_partial(page, rest)
            elif self._store is not None and (block_hash := next(filter(self._store.may_have, candidates), None)):
                hashes, partial_tokens = [*hashes, block_hash], rest
        self._count(run, kv.computed)
        given = SuppliedKv(run.request_id, kv.published, run.given_pages) if kv.published < run.given_pages else None
        self._look_further(kv, hashes, partial_tokens, given, resumes=kv.preemptions + run.reruns > 0)
        if not kv.loading:
            self.let_go(run)

    def catch_up(self, run: Run) -> None:
        """Gives a run that has computed nothing the next pages of its prefix, which others have published meanwhile.

        For a first stage, after `attach` and while the run `takes_pages`.
        """
        kv, wanted = run.kv, run.reusable // PAGE
        pages = self._pool.share(self.names(run)[kv.published : wanted])
        if not pages:
            return
        before = kv.published
        kv.attach_more(pages, shared=run.private)
        if self._store is not None and run.private:
            for page, block_hash in zip(pages, kv.hashes[before:], strict=False):
                self._store.put(page, block_hash)  # as `attach` does
        self._count(run, len(pages) * PAGE)

    def names(self, run: Run) -> Sequence[bytes]:
        """Names under which other requests find the leading full pages of a run, as far as they are known.

        Empty if no other request will find its next pages.
        """
        if not run.private:
            return run.kv.hashes
        return run.kv.local_hashes if run.kv.shared == run.kv.published else ()

    def take(self, run: Run, done: Loaded) -> None:
        """Ends the load that `run` waited for: the run keeps the pages that were filled, the others are freed.

        `done.load` must be `run.kv.loading`.
        """
        kv, before = run.kv, run.kv.computed
        first, full = kv.published, done.count - (done.load.partial_tokens > 0 and done.count == len(done.load.hashes))
        for index in range(first, first + full):
            self._pool.publish(kv.pages[index], kv.hashes[index])
        self.let_go(run)
        self._pool.free(kv.loaded(done.count))  # the rest is allocated again when rows come to it
        self._count(run, kv.computed - before)

    def hold(self, run: Run, *, for_next: bool = False) -> None:
        """Has the page store hold the pages of a run that will be preempted, until `let_go` or its next load.

        To be called while the run has its pages. `for_next`: the run ends, and the next one of its request reads them.
        """
        kv = run.kv
        if self._store is not None and kv.published:
            self._store.hold(kv.pages[: kv.published], kv.hashes[: kv.published])
            kv.held = kv.published
        if for_next:
            kv.held = 0  # the end of this run lets nothing go

    def let_go(self, run: Run) -> None:
        """Lets the page store drop the pages that it holds for the run, if any."""
        kv = run.kv
        if self._store is not None and kv.held:
            self._store.let_go(kv.hashes[: kv.held])
            kv.held = 0

    def settle(self) -> None:
        """Waits until the page store writes into no page of the pool."""
        if self._store is not None:
            self._store.settle()

    def close(self, timeout_s: float) -> None:
        """Closes the page store, once every page that was put is written or `timeout_s` seconds have passed."""
        if self._store is not None:
            self._store.flush(timeout_s)
            self._store.close()

    def publish(self, run: Run, tokens: int) -> None:
        """Publishes the run's full pages within the first `tokens` tokens, which are known and computed."""
        kv, full = run.kv, tokens // PAGE
        if full <= kv.published or not (self._exact or run.private):
            return
        self._extend(run, full)
        # Pages that came from another worker have no local name, and then pages behind them get none.
        local = self._local(run, full) if kv.shared == kv.published else []
        for index in range(kv.published, full):
            page, block_hash = kv.pages[index], kv.hashes[index]
            if local:
                named = self._pool.publish(page, local[index]) or self._pool.publish(page, block_hash)
            else:
                named = self._pool.publish(page, block_hash)
            if named and self._store is not None:
                self._store.put(page, block_hash)
        kv.mark_published(full, full if local else kv.shared)

    def distrust(self, run: Run, tokens: int) -> None:
        """Withdraws the KV behind the run's first `tokens` tokens, which is wrong, so that no later run reuses it.

        `run.computed` falls to `tokens`, if it was more. The run keeps its pages; those behind these tokens, and one
        that they fill only in part, lose their block hashes. Their removal from the store is queued.
        """
        hashes = run.kv.hashes
        spoiled = run.kv.distrust(tokens)
        for index in spoiled:
            self._pool.unpublish(run.kv.pages[index])
        if self._store is not None and spoiled:
            self._store.discard([hashes[index] for index in spoiled])

    def _local(self, run: Run, pages: int) -> list[bytes]:
        """Names by which other requests of this worker may reuse the first `pages` pages of a private run.

        Empty for runs that do not share, and for those whose client supplied KV.
        """
        if not run.private or run.given_pages or not self._shares(run):
            return []
        session, behind = "" if self._shares_private else run.body.session, run.route[: self._stage]
        root = local_root_hash(
            pool_id=self._pool_id, salt=run.body.salt, model_hash=self._model_hash, session=session, behind=behind
        )
        extend_hashes(run.kv.local_hashes, root, run.tokens, pages)
        return run.kv.local_hashes[:pages]

    def _shares(self, run: Run) -> bool:
        """True if other requests may reuse the run's pages."""
        return not run.private or self._shares_private or bool(run.body.session)

    def leave(self, run: Run) -> tuple[int, bytes] | None:
        """Publishes the partial last page of a private run that leaves, for the next run of its request.

        Returns the page and its name. Returns None for a run that is not private, without such a page, if a full page
        before it is not published, and if page or name are published already.
        """
        kv = run.kv
        full, rest = divmod(kv.computed, PAGE)
        if not run.private or not rest or full != kv.published or full >= len(kv.pages):
            return None
        page = kv.pages[full]
        if self._pool.is_published(page):
            return None
        (block_hash, *_) = self._partial_hashes(run, full, rest)
        return (page, block_hash) if self._pool.publish(page, block_hash) else None

    def export(self, run: Run, timeout_s: float) -> None:
        """Writes the partial last page of a private run to the store, and waits until it and all before it are there.

        Waits up to `timeout_s` seconds. Full pages were queued for the store when they were published. Without a store,
        or where `leave` returns None, it returns at once, perhaps before full pages are written.
        """
        if (left := self.leave(run)) and self._store is not None:
            self._store.put(*left)
            self._store.flush(timeout_s)

    def _partial_hashes(self, run: Run, full: int, rest: int) -> list[bytes]:
        """Names of the page behind `full` pages, for each number of tokens from `rest` on that it may hold.

        A page with more of the run's tokens holds the first `rest` too. The last name is the full page's, if known.
        """
        self._extend(run, min(full + 1, len(run.tokens) // PAGE))
        hashes, tokens = run.kv.hashes, run.tokens[full * PAGE : (full + 1) * PAGE]
        before = hashes[full - 1] if full else self._root(run)
        partial = [partial_page_hash(before, tokens[:n]) for n in range(rest, min(len(tokens), PAGE - 1) + 1)]
        return partial + hashes[full : full + 1]

    def _root(self, run: Run) -> bytes:
        if run.private:
            return private_root_hash(request_id=run.request_id, model_hash=self._model_hash)
        return root_hash(salt=run.body.salt, model_hash=self._model_hash, numerics=self._numerics)

    def _extend(self, run: Run, pages: int) -> None:
        extend_hashes(run.kv.hashes, self._root(run), run.tokens, pages)

    def _look_further(
        self, kv: KvState, hashes: list[bytes], partial_tokens: int, given: SuppliedKv | None, *, resumes: bool
    ) -> None:
        """Starts to load the pages `hashes`, which follow the run's own, if the store may have them.

        The last one is a partial page of which `partial_tokens` tokens are wanted, unless that is 0. `given`: KV that
        the client supplied for them. `resumes`: the run was preempted, or the request has run before.
        """
        room = min(len(hashes), self._pool.free_pages)
        if self._store is None or not room or not (given or self._store.may_have(hashes[0], resumes=resumes)):
            return
        last = partial_tokens if room == len(hashes) else 0
        pages = tuple(self._pool.allocate(room))
        load = KvLoad(tuple(hashes[:room]), pages, last, given, resumes)
        kv.wait_for(load)
        self._store.load(load, self._deliver)

    def _count(self, run: Run, tokens: int) -> None:
        if run.kv.preemptions:
            return
        run.kv.cached += tokens
        if self._counts and self._shares(run):
            self._metrics.prefix_cache_hits.inc(tokens)

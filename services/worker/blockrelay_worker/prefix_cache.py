"""Known beginnings: a run takes the pages that hold its first tokens already, and names those that it fills itself.

Only in precisions marked exact: there a page's bits are a function of what its name says.
"""

from typing import TYPE_CHECKING

from blockrelay.metrics import WorkerMetrics
from blockrelay_worker.kernels.numerics import PAGE
from blockrelay_worker.page_names import extend_names, root_name
from blockrelay_worker.pages import PagePool

if TYPE_CHECKING:
    from blockrelay_worker.runs import Run


class PrefixCache:
    """What one worker knows about pages. Used by the engine thread only."""

    def __init__(self, pool: PagePool, *, model_hash: str, numerics: str, metrics: WorkerMetrics) -> None:
        self._pool, self._metrics = pool, metrics
        self._model_hash, self._numerics = model_hash, numerics
        pool.on_evict = metrics.prefix_cache_evictions.inc

    def attach(self, run: "Run", exactly: int | None) -> None:
        """See `RunTable.adopt`."""
        most = run.most_found if exactly is None else exactly
        self._extend(run, most // PAGE)
        run.pages = self._pool.share(run.names[: most // PAGE])
        run.sealed = len(run.pages)
        run.computed = run.sealed * PAGE
        self._count(run, exactly)

    def seal(self, run: "Run", tokens: int) -> None:
        """Name the run's full pages within the first `tokens` tokens, which are known and computed."""
        full = tokens // PAGE
        if full <= run.sealed:
            return
        self._extend(run, full)
        for index in range(run.sealed, full):
            self._pool.name(run.pages[index], run.names[index])
        run.sealed = full

    def _extend(self, run: "Run", pages: int) -> None:
        root = root_name(salt=run.body.salt, model_hash=self._model_hash, numerics=self._numerics)
        extend_names(run.names, root, run.tokens, pages)

    def _count(self, run: "Run", exactly: int | None) -> None:
        """vLLM's way: tokens asked for and found, once per request, preempted ones not again; by the first stage."""
        if run.preemptions:
            return
        run.cached = run.computed
        if exactly is None:
            self._metrics.prefix_cache_queries.inc(len(run.tokens))
            self._metrics.prefix_cache_hits.inc(run.computed)

"""The runs that are on this worker: the only owner of what changes while a request runs here."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_worker.kv.pool import PagePool, pages_for
from blockrelay_worker.kv.prefix_cache import PrefixCache
from blockrelay_worker.kv.store.store import Load, Loaded
from blockrelay_worker.sampling.prompt_lookup import Drafter, right_drafts
from blockrelay_worker.sampling.stop_conditions import Progress

#: Batches of a run whose seconds are added up at a time.
SUMMED_TOGETHER = 64


@dataclass(slots=True, kw_only=True)
class Run:
    """One attempt at a request, as this worker's stage sees it.

    `names` are the content names of its leading full pages, as far as they were needed. The first `sealed` of `pages`
    are named or found and never written again. A `cold` run takes no page that it has not computed itself. While a
    tier is `loading` pages for it, nothing of it is computed.

    `tokens` every known token, prompt first; `computed` how many of them have their KV in `pages` of this stage
    (0 <= computed <= len(tokens)). First stage: rows are missing while computed < len(tokens). Later stages learn the
    tokens with the rows. Last stage: `progress` decides the end, `committed` counts tokens handed to COMMIT.
    """

    request: str
    run: str
    route: tuple[str, ...]
    body: RequestBody
    params: SamplingParams
    seed: int
    tokens: list[int]
    alone_until: int = 0  # rows before this position are computed alone (a request that may have killed workers)
    progress: Progress | None = None
    committed: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list[int])
    names: list[bytes] = field(default_factory=list[bytes])
    sealed: int = 0
    loading: Load | None = None
    adopted: bool = False  # known pages were looked for
    cold: bool = False
    until: float | None = None  # first stage: its deadline, on the monotonic clock
    cached: int = 0  # tokens whose KV was found instead of computed when the run came
    preemptions: int = 0
    sent: int = 0  # forward messages of this run to the next stage
    expected: int = 0  # sequence number of the next forward message from the stage before
    drafter: Drafter | None = None  # first stage, once it has tried to guess
    drafts: tuple[int, ...] = ()  # first of several stages: guesses on their way through the others
    ended: bool = False  # the last token is chosen; only its COMMIT is outstanding
    served: int = 0  # iteration that last computed rows of it
    batches: list[Mapping[str, float]] = field(default_factory=list[Mapping[str, float]])  # seconds not yet in the sums
    sums: dict[str, float] = field(default_factory=dict[str, float])
    passing: dict[str, float] = field(default_factory=dict[str, float])  # of the rows here now, stages before
    gpu_blocks: tuple[str, ...] = ()  # which of the stages' before ran on a GPU
    logits: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])

    @property
    def prompt_length(self) -> int:
        return int(self.body.prompt.size)

    @property
    def solo(self) -> bool:
        """Its next rows are computed alone."""
        return self.computed < self.alone_until

    @property
    def missing(self) -> int:
        """Rows that can be computed now (first stage)."""
        return 0 if self.ended or self.loading else len(self.tokens) - self.computed

    @property
    def most_found(self) -> int:
        """Tokens at most whose KV may be found instead of computed: the rows of the others are needed."""
        most = len(self.tokens) - 1
        return min(most, self.body.prior) if self.body.logits == "all" else most

    def learn(self, tokens: Sequence[int]) -> None:
        """Several stages: `tokens` became known. The rows of drafts that were right are computed already."""
        if not tokens:
            return
        accepted = right_drafts(self.drafts, tokens)
        if self.drafter is not None:
            self.drafter.verdict(len(self.drafts), accepted)
        self.tokens += tokens
        self.computed += accepted
        self.drafts = ()

    def wants_logits(self, position: int) -> bool:
        """Whether the logits of the row at `position` are asked for, the sampling row aside."""
        return self.body.logits == "all" and position >= self.body.prior

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        """Last stage: what each block spent on a batch with rows of this run; nobody changes it afterwards."""
        if seconds:
            self.batches.append(seconds)  # summed up now and then: between two steps everybody waits
            if len(self.batches) == SUMMED_TOGETHER:
                self.block_seconds()

    def block_seconds(self) -> dict[str, float]:
        """Last stage: sums over the run."""
        for seconds in self.batches:
            for block, value in seconds.items():
                self.sums[block] = self.sums.get(block, 0.0) + value
        self.batches.clear()
        return self.sums


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

    def __len__(self) -> int:
        return len(self._runs)

    def all(self) -> list[Run]:
        return list(self._runs.values())

    def get(self, request: str, run: str) -> Run | None:
        """The run, if exactly this one is here."""
        found = self._runs.get(request)
        return found if found is not None and found.run == run else None

    def add(self, run: Run) -> None:
        """Put a run on the table; an older run of the same request is dropped."""
        self._drop_request(run.request)
        self._runs[run.request] = run
        self.view = {r.request: r.run for r in self._runs.values()}

    def drop(self, request: str, run: str) -> bool:
        """Forget a run and free its pages. False when it is not here (any more)."""
        if self.get(request, run) is None:
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

    def grow(self, run: Run, tokens: int) -> bool:
        """Make `run.pages` cover `tokens` tokens. False, changing nothing, when the pool has too few free pages."""
        wanted = pages_for(tokens) - len(run.pages)
        if wanted > self.pool.free_pages:
            return False
        if wanted > 0:
            run.pages += self.pool.allocate(wanted)
        return True

    def adopt(self, run: Run, *, exactly: int | None = None) -> None:
        """Give a run without pages the longest known beginning of its tokens: sets `pages` and `computed`.

        Whole pages, at most `run.most_found` tokens. A later stage wants `exactly` as many tokens as its first rows'
        position says, and has them afterwards if run.computed says so. Either may have to wait for a tier of the page
        store first: until `loaded`, run.loading is set.
        """
        assert not run.pages and run.computed == 0, "only a run without pages adopts some"
        run.adopted = True
        if exactly and not self.pool.layout.layers:
            run.computed = run.cached = exactly  # the head alone keeps nothing, so it lacks nothing
        elif self._cache is not None and not run.cold:
            self._cache.attach(run, exactly)

    def is_loading(self, request: str) -> bool:
        """Whether the request's run waits for a tier."""
        run = self._runs.get(request)
        return run is not None and run.loading is not None

    def loaded(self, done: Loaded) -> None:
        """A load has ended: its run goes on behind what was found, or its pages are free."""
        if done.load in self._orphans:
            self._free_orphan(done.load)
        for run in self._runs.values():
            if run.loading is done.load and self._cache is not None:
                self._cache.take(run, done)

    def seal(self, run: Run, known: int | None = None) -> None:
        """Name the pages that are full by now, so that others find them.

        `known`: how many leading tokens of run.tokens are no drafts (default: all).
        """
        if self._cache is not None:
            self._cache.seal(run, min(run.computed, len(run.tokens) if known is None else known))

    def preempt(self, run: Run) -> None:
        """Take the pages of a run that stays on the table; those with a name can be found again."""
        self._release(run)
        run.adopted = False
        run.computed = 0
        run.logits.clear()
        run.preemptions += 1

    def check_integrity(self) -> None:
        """Every page in use belongs to the runs that are its users. AssertionError otherwise (our bug)."""
        owned = Counter(page for run in self._runs.values() for page in run.pages)
        owned.update(page for load in self._orphans for page in load.pages)
        assert owned == self.pool.users, "pages are in use without a run, or by a run that does not have them"
        self.pool.check_integrity()

    def _drop_request(self, request: str) -> None:
        run = self._runs.pop(request, None)
        if run is None:
            return
        self._release(run)
        self.view = {r.request: r.run for r in self._runs.values()}

    def _release(self, run: Run) -> None:
        if run.loading is not None:  # somebody writes into these pages
            self._orphans.add(run.loading)
            del run.pages[len(run.pages) - len(run.loading.pages) :]
        self.pool.free(run.pages)
        run.pages, run.sealed, run.loading = [], 0, None

    def _free_orphan(self, load: Load) -> None:
        self._orphans.remove(load)
        self.pool.free(load.pages)

"""The runs that are on this worker: the only owner of what changes while a request runs here."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from blockrelay.messages import RequestBody
from blockrelay.sampling_params import SamplingParams
from blockrelay_worker.advance import Progress
from blockrelay_worker.pages import PagePool, pages_for


@dataclass(slots=True, kw_only=True)
class Run:
    """One attempt at a request, as this worker's stage sees it.

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
    solo: bool = False
    progress: Progress | None = None
    committed: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list[int])
    sent: int = 0  # forward messages of this run to the next stage
    expected: int = 0  # sequence number of the next forward message from the stage before
    ended: bool = False  # the last token is chosen; only its COMMIT is outstanding
    served: int = 0  # iteration that last computed rows of it
    block_seconds: dict[str, float] = field(default_factory=dict[str, float])  # last stage: sums over the run
    passing: dict[str, float] = field(default_factory=dict[str, float])  # of the rows here now, stages before
    gpu_blocks: tuple[str, ...] = ()  # which of the stages' before ran on a GPU
    logits: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])

    @property
    def prompt_length(self) -> int:
        return int(self.body.prompt.size)

    @property
    def missing(self) -> int:
        """Rows that can be computed now (first stage)."""
        return 0 if self.ended else len(self.tokens) - self.computed

    def wants_logits(self, position: int) -> bool:
        """Whether the logits of the row at `position` are asked for, the sampling row aside."""
        return self.body.logits == "all" and position >= self.body.prior

    def add_seconds(self, seconds: dict[str, float]) -> None:
        for block, value in seconds.items():
            self.block_seconds[block] = self.block_seconds.get(block, 0.0) + value


class RunTable:
    """request id -> Run, and the page pool they share. Used by the engine thread only, except `view`."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
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

    def grow(self, run: Run, tokens: int) -> bool:
        """Make `run.pages` cover `tokens` tokens. False, changing nothing, when the pool has too few free pages."""
        wanted = pages_for(tokens) - len(run.pages)
        if wanted > self.pool.free_pages:
            return False
        if wanted > 0:
            run.pages += self.pool.allocate(wanted)
        return True

    def check_integrity(self) -> None:
        """Every page in use belongs to exactly one run. AssertionError otherwise (our bug)."""
        owned = [page for run in self._runs.values() for page in run.pages]
        assert len(owned) == len(set(owned)), "a page belongs to two runs"
        assert len(owned) == self.pool.used_pages, "pages are in use without a run"
        self.pool.check_integrity()

    def _drop_request(self, request: str) -> None:
        run = self._runs.pop(request, None)
        if run is None:
            return
        self.pool.free(run.pages)
        run.pages = []
        self.view = {r.request: r.run for r in self._runs.values()}

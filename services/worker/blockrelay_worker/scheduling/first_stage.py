"""The first stage's rows: known tokens whose KV is missing, guesses behind them, and the pages for both."""

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.scheduling.batch_policy import Candidate, choose_rows
from blockrelay_worker.scheduling.limits import BatchLimits
from blockrelay_worker.scheduling.micro_batches import decode_share
from blockrelay_worker.scheduling.preemption import Holding, claimable_pages, startable, victim
from blockrelay_worker.scheduling.route_members import RouteMembers, RouteShape
from blockrelay_worker.scheduling.step_cost import StepCost, draft_rows, prompt_rows_alone, prompt_rows_beside
from blockrelay_worker.scheduling.work import Work


class SchedulableRun(Protocol):
    """A run as the choice of rows sees it; `missing` rows of it can be computed now."""

    @property
    def request(self) -> str: ...
    @property
    def route(self) -> tuple[str, ...]: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def pages(self) -> Sequence[int]: ...
    @property
    def computed(self) -> int: ...
    @property
    def missing(self) -> int: ...
    @property
    def is_decoding(self) -> bool:
        """Its prompt is computed, and its next token is on its way or can be computed."""
        ...

    @property
    def quarantined(self) -> bool:
        """Its next rows are computed without neighbours."""
        ...

    @property
    def searched(self) -> bool:
        """Known pages were looked for."""
        ...

    @property
    def last_step(self) -> int:
        """The step that last computed rows of it."""
        ...

    def guesses(self, limit: int) -> list[int]:
        """At most `limit` guesses at the tokens behind the last known one."""
        ...


R = TypeVar("R", bound=SchedulableRun)


class Runs(Protocol[R]):
    """The runs on this worker, oldest first, and the pages they share."""

    def all(self) -> list[R]: ...
    @property
    def free_pages(self) -> int: ...
    def grow(self, run: R, tokens: int) -> bool:
        """Pages for `tokens` tokens; False, changing nothing, when too few are free."""
        ...

    def adopt(self, run: R) -> None:
        """Give a run without pages those of its beginning that are known. It may have to wait for them."""
        ...

    def preempt(self, run: R) -> None:
        """Take the pages of a run that stays."""
        ...

    def is_loading(self, request: str) -> bool:
        """Whether somebody writes into its pages, so that they cannot be taken."""
        ...


class FirstStageBatcher(Generic[R]):
    """Makes the batches of a first stage. Used by the engine thread only.

    `full_workers` asks for the workers of the next stage whose inbox is full. With `whole_model` nothing was reserved
    for the runs: they share what pages there are, the oldest first.
    """

    def __init__(
        self,
        limits: BatchLimits,
        runs: Runs[R],
        members: RouteMembers,
        full_workers: Callable[[], frozenset[str]],
        metrics: WorkerMetrics,
        *,
        whole_model: bool,
    ) -> None:
        self._runs, self._members, self._metrics = runs, members, metrics
        self._alone = RouteShape(1, limits)
        self._full_workers, self._whole_model = full_workers, whole_model

    def take(self, cost: StepCost) -> list[Work[R]]:
        """The next batch; grows the page lists of its runs, and preempts younger runs where there are too few."""
        runs = {run.request: run for run in self._runs.all() if run.missing}
        if not runs:
            return []
        candidates = {r.request: Candidate(r.request, r.missing, r.quarantined, r.last_step) for r in self._ready(runs)}
        everything = self._runs.all()
        shape = self._shape_of(everything)
        groups, limits = shape.groups, shape.limits
        # Chunks of a pipeline are shorter: the next stage can begin earlier.
        max_rows = limits.max_rows if groups == 1 else max(1, limits.max_rows // (2 * groups))
        decoding = [None if r.missing else r.last_step for r in everything if r.is_decoding]
        if decoding:
            prompt_rows = prompt_rows_beside(cost, limits.step_share_s, max_rows)
        else:
            prompt_rows = prompt_rows_alone(cost, limits.chunk_s, max_rows)
        chosen = dict(
            choose_rows(
                list(candidates.values()),
                max_rows,
                max_sequences=limits.max_sequences,
                ragged=limits.ragged,
                max_decoding=None if self._whole_model else decode_share(decoding, groups),
                prompt_rows=prompt_rows,
            )
        )
        return self._work(runs, candidates, chosen, cost, limits)

    def claimable_pages(self) -> int:
        """Pages that new jobs may take; means something only where nothing is reserved."""
        return claimable_pages(self._holdings(), self._runs.free_pages)

    def _work(
        self,
        runs: dict[str, R],
        candidates: dict[str, Candidate],
        chosen: dict[str, int],
        cost: StepCost,
        limits: BatchLimits,
    ) -> list[Work[R]]:
        """The chosen rows of each run, as far as there are pages for them, and guesses behind them."""
        work: list[Work[R]] = []
        decoding = sum(1 for request, rows in chosen.items() if runs[request].missing == rows == 1)
        drafts = limits.drafts and decoding == len(chosen)  # beside prompts no row is cheap
        drafts_left = min(draft_rows(cost, decoding), limits.max_rows - decoding) if drafts else 0
        for request, run in runs.items():  # oldest first, so that nobody is preempted who is in the batch already
            rows = chosen.get(request, 0)
            if not rows or run.missing != candidates[request].missing or not self._grow(run, run.computed + rows):
                continue  # not its turn, preempted just now, or no page left
            end = run.computed + rows
            samples = end == len(run.tokens)
            tokens = list(run.tokens[run.computed : end])
            guesses: list[int] = []
            if samples and rows == 1 and drafts_left:
                guesses = self._guesses(run, -(-drafts_left // max(1, decoding)))
                drafts_left -= len(guesses)
                decoding -= 1
            work.append(
                Work(run=run, position=run.computed, tokens=tokens + guesses, samples=samples, drafts=len(guesses))
            )
        return work

    def _ready(self, runs: dict[str, R]) -> list[R]:
        """Runs that may compute: not held up by a full inbox or, before their first page, by too few pages."""
        if self._whole_model:
            if all(run.pages for run in runs.values()):
                return list(runs.values())
            allowed = startable(self._holdings(), self._runs.free_pages)
            ready = [run for run in runs.values() if run.request in allowed]
            for run in ready:
                if not run.searched:
                    self._runs.adopt(run)
            return [run for run in ready if run.missing]
        full = self._full_workers()
        return [r for r in runs.values() if r.missing == 1 or r.route[1] not in full]

    def _shape_of(self, runs: Sequence[R]) -> RouteShape:
        if self._whole_model:
            return self._alone
        return self._members.shape(frozenset(worker for run in runs for worker in run.route))

    def _grow(self, run: R, tokens: int) -> bool:
        while not self._runs.grow(run, tokens):
            # Where pages are reserved, those of a run that has just ended elsewhere come back with its note.
            # A run whose pages are being loaded cannot give them back at once.
            holdings = [h for h in self._holdings() if not self._runs.is_loading(h.request)]
            name = victim(holdings, run.request) if self._whole_model else None
            if name is None:
                return False
            self._runs.preempt(next(r for r in self._runs.all() if r.request == name))
            self._metrics.preemptions.inc()
        return True

    def _holdings(self) -> list[Holding]:
        return [Holding(r.request, len(r.pages), pages_for(len(r.tokens) + 1)) for r in self._runs.all()]

    def _guesses(self, run: R, limit: int) -> list[int]:
        """Guesses behind the last known token, with pages for them."""
        guesses = [] if run.quarantined else run.guesses(limit)
        return guesses if guesses and self._runs.grow(run, len(run.tokens) + len(guesses)) else []

"""Makes the batches of a first stage: known tokens without KV, drafts behind them, and KV pages for both."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.constants import MAX_DRAFTS
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.kernels.specification import PAGE
from blockrelay_worker.kv.run_table import RunTable
from blockrelay_worker.kv.shared_prefill import Prefill, waiting
from blockrelay_worker.runs.run import Run
from blockrelay_worker.scheduling.batch_policy import Candidate, choose_tokens
from blockrelay_worker.scheduling.guesses import Guesser
from blockrelay_worker.scheduling.limits import BatchLimits
from blockrelay_worker.scheduling.micro_batches import decode_share
from blockrelay_worker.scheduling.preemption import Holding, claimable_pages, startable, victim
from blockrelay_worker.scheduling.route_members import RouteMembers, RouteShape
from blockrelay_worker.scheduling.step_cost import StepCost, max_drafts, prompt_tokens_alone, prompt_tokens_beside
from blockrelay_worker.scheduling.work import Work


class FirstStageBatcher:
    """Makes the batches of a first stage. Used by the engine thread only.

    `full_workers` returns the ids of workers of the next stage whose inbox is full. With `whole_model` no pages are
    reserved: runs share those of the pool, and older runs go first. `guesser` guesses tokens where a run's own tokens
    do not suggest any.
    """

    def __init__(
        self,
        limits: BatchLimits,
        runs: RunTable,
        members: RouteMembers,
        full_workers: Callable[[], frozenset[str]],
        metrics: WorkerMetrics,
        *,
        whole_model: bool,
        guesser: Guesser | None = None,
    ) -> None:
        self._runs, self._members, self._metrics = runs, members, metrics
        self._alone = RouteShape(1, limits)
        self._full_workers, self._whole_model, self._guesser = full_workers, whole_model, guesser
        self._waiting: frozenset[str] = frozenset()  # requests that waited for the pages of others in the last step

    def take(self, cost: StepCost) -> list[Work]:
        """Returns the next batch, empty if no run can compute. Gives its runs the pages they need.

        If too few pages are free, younger runs are preempted with `whole_model`; otherwise the run waits. Without
        `whole_model` it may wait for Redis, and raises Stopping when the process should end meanwhile.
        """
        if self._guesser is not None:
            self._guesser.look(self._runs.all())
        runs = {run.request_id: run for run in self._runs.all() if run.missing}
        if not runs:
            return []
        candidates = {
            r.request_id: Candidate(r.request_id, r.step_tokens, r.quarantined, r.last_step)
            for r in self._apart(self._ready(runs))
        }
        everything = self._runs.all()
        shape = self._shape_of(everything)
        groups, limits = shape.groups, shape.limits
        # With several stages prompt chunks are shorter, so that the next stage can begin earlier.
        max_rows = limits.max_rows if groups == 1 else max(1, limits.max_rows // (2 * groups))
        decoding = [None if r.missing else r.last_step for r in everything if r.is_decoding]
        if decoding:
            prompt_tokens = prompt_tokens_beside(cost, limits.step_share_s, max_rows)
        else:
            prompt_tokens = prompt_tokens_alone(cost, limits.chunk_s, max_rows)
        chosen = dict(
            choose_tokens(
                list(candidates.values()),
                max_rows,
                max_sequences=limits.max_sequences,
                ragged=limits.ragged,
                max_decoding=None if self._whole_model else decode_share(decoding, groups),
                prompt_tokens=prompt_tokens,
            )
        )
        return self._work(runs, candidates, chosen, cost, limits)

    def claimable_pages(self) -> int:
        """Number of pages that new jobs may take. It has a meaning only with `whole_model`, where runs reserve none."""
        return claimable_pages(self._holdings(self._runs.all()), self._runs.pool.free_pages)

    def close(self) -> None:
        """Frees what guesses need. No batch may be made afterwards."""
        if self._guesser is not None:
            self._guesser.close()

    def _work(
        self,
        runs: dict[str, Run],
        candidates: dict[str, Candidate],
        chosen: dict[str, int],
        cost: StepCost,
        limits: BatchLimits,
    ) -> list[Work]:
        """The chosen tokens of each run, as far as there are pages for them, with drafts behind them."""
        work: list[Work] = []
        decoding = sum(1 for request_id, rows in chosen.items() if runs[request_id].missing == rows == 1)
        drafts = limits.drafts and decoding == len(chosen)  # beside prompt tokens a draft is not cheap
        drafts_left = max_drafts(cost, decoding) if drafts else 0
        rows_left = limits.max_rows - sum(chosen.values())
        for request_id, run in runs.items():  # oldest first, so that no run of this batch is preempted for a later one
            rows = chosen.get(request_id, 0)
            unchanged = run.step_tokens == candidates[request_id].missing if rows else False
            if not unchanged or not self._grow(run, run.computed + rows):
                continue  # not its turn, preempted just now, or no page left
            end = run.computed + rows
            samples = end == len(run.tokens)
            tokens = list(run.tokens[run.computed : end])
            draft_tokens: list[int] = []
            if samples and limits.drafts and rows_left:
                draft_tokens = self._forced_tokens(run, min(MAX_DRAFTS, rows_left))
            if samples and rows == 1:
                if drafts_left > 0 and rows_left and not draft_tokens:
                    draft_tokens = self._draft_tokens(run, min(rows_left, -(-drafts_left // decoding)))
                decoding -= 1
            drafts_left -= len(draft_tokens)
            rows_left -= len(draft_tokens)
            work.append(
                Work(
                    run=run,
                    position=run.computed,
                    tokens=tokens + draft_tokens,
                    samples=samples,
                    drafts=len(draft_tokens),
                )
            )
        if self._guesser is None or not work:
            return work
        if not drafts:
            self._guesser.interrupt()
            return work
        return self._guessed(self._guesser, work, cost, limits.max_rows)

    def _guessed(self, guesser: Guesser, work: list[Work], cost: StepCost, max_rows: int) -> list[Work]:
        """The work of a step of decode tokens, with guesses behind those that have no drafts, as far as they fit."""
        if not (count := guesser.count(self._runs.all(), cost)):
            return work
        rows_left = max_rows - sum(item.rows for item in work)
        asked: dict[int, tuple[Run, int]] = {}
        for index, item in enumerate(work):
            run, limit = item.run, min(count, rows_left, item.run.draft_room)
            may = limit > 0 and item.samples and not item.drafts and not run.quarantined
            if may and self._runs.grow(run, len(run.tokens) + limit):
                asked[index] = (run, limit)
                rows_left -= limit
        if asked:
            for (index, (run, _)), guesses in zip(asked.items(), guesser.guess(list(asked.values())), strict=True):
                if guesses and run.first is not None:
                    run.first.by_look_up = False
                    work[index] = replace(work[index], tokens=[*work[index].tokens, *guesses], drafts=len(guesses))
        return work

    def _ready(self, runs: dict[str, Run]) -> list[Run]:
        """Runs that may compute: not held up by a full inbox or, without a page yet, by too few free pages."""
        if self._whole_model:
            if all(run.pages for run in runs.values()):
                return list(runs.values())
            allowed = startable(self._holdings(self._runs.all()), self._runs.pool.free_pages)
            ready = [run for run in runs.values() if run.request_id in allowed]
            for run in ready:
                if not run.kv.searched:
                    self._runs.attach_prefix(run)
            return [run for run in ready if run.missing]
        full = self._full_workers()
        return [r for r in runs.values() if r.missing == 1 or r.route[1] not in full]

    def _apart(self, ready: list[Run]) -> list[Run]:
        """Returns those of the `ready` runs that wait for no pages which another run is computing.

        Those that waited before get the pages that are there by now.
        """
        beginners = {run.request_id: run for run in ready if run.missing > 1 and run.kv.takes_pages and not run.sent}
        if not beginners:
            self._waiting = frozenset()
            return ready
        waits, waited = waiting(self._prefills(ready, beginners)), self._waiting & beginners.keys()
        while come := waited - waits:  # with its pages one may be far enough for others to have theirs
            for request_id in come:
                self._runs.catch_up(beginners[request_id])
            waits, waited = waiting(self._prefills(ready, beginners)), waited - come
        self._waiting = waits
        return [run for run in ready if run.request_id not in waits] if waits else ready

    def _prefills(self, ready: list[Run], beginners: Mapping[str, Run]) -> list[Prefill]:
        """The runs whose prompts are being computed, oldest first; those among `beginners` may take pages of others."""
        if self._whole_model:
            prefills = [run for run in ready if run.missing > 1]
        else:  # until the first token comes, later stages may lack the pages that a run computes
            prefills = [run for run in self._runs.all() if run.first is not None and run.first.claimed is not None]
        return [
            Prefill(
                request_id=run.request_id,
                route=() if self._whole_model else run.route[1:],
                names=self._runs.names(run),
                computed=run.computed,
                wanted=run.reusable // PAGE if run.request_id in beginners else 0,
                certain=run.computed if self._whole_model else run.kv.cached,
            )
            for run in prefills
            if not run.quarantined_until and not run.ended
        ]

    def _shape_of(self, runs: Sequence[Run]) -> RouteShape:
        if self._whole_model:
            return self._alone
        return self._members.shape(frozenset(worker_id for run in runs for worker_id in run.route))

    def _grow(self, run: Run, tokens: int) -> bool:
        """Gives a run pages for `tokens` tokens, and may preempt younger runs for that. False: the run must wait."""
        while not self._runs.grow(run, tokens):
            # With reserved pages this run waits: a run that ended elsewhere frees its pages when the event arrives.
            # A run whose pages are being loaded cannot give them back at once.
            holdings = self._holdings(run for run in self._runs.all() if not run.kv.loading)
            victim_id = victim(holdings, run.request_id) if self._whole_model else None
            if victim_id is None:
                return False
            self._runs.preempt(next(r for r in self._runs.all() if r.request_id == victim_id))
            self._metrics.preemptions.inc()
        return True

    def _holdings(self, runs: Iterable[Run]) -> list[Holding]:
        return [Holding(run.request_id, len(run.pages), pages_for(len(run.tokens) + 1)) for run in runs]

    def _forced_tokens(self, run: Run, limit: int) -> list[int]:
        """Returns tokens that a grammar forces behind the last known one; none if there are no pages for them.

        They are certain, so unlike drafts they are worth their rows beside prompt tokens too.
        """
        forced = [] if run.quarantined else run.forced_tokens(limit)
        if forced and run.first is not None:
            run.first.by_look_up = False
        return forced if forced and self._runs.grow(run, len(run.tokens) + len(forced)) else []

    def _draft_tokens(self, run: Run, limit: int) -> list[int]:
        """Draft tokens behind the last known token; none if there are no pages for them."""
        draft_tokens = [] if run.quarantined else run.draft_tokens(limit)
        if draft_tokens and run.first is not None:
            run.first.by_look_up = True
        return draft_tokens if draft_tokens and self._runs.grow(run, len(run.tokens) + len(draft_tokens)) else []

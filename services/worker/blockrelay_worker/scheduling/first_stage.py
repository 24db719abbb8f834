"""The first stage's rows: known tokens whose KV is missing, guesses behind them, and the pages for both."""

from collections.abc import Sequence

from blockrelay.observability.metrics import WorkerMetrics
from blockrelay_worker.engine.runs import Run, RunTable
from blockrelay_worker.engine.work import Work
from blockrelay_worker.kv.pool import pages_for
from blockrelay_worker.lifecycle.stage_role import StageRole
from blockrelay_worker.sampling.prompt_lookup import Drafter
from blockrelay_worker.scheduling.batch_policy import Candidate, choose_rows
from blockrelay_worker.scheduling.micro_batches import Groups, decode_share
from blockrelay_worker.scheduling.preemption import Holding, claimable_pages, startable, victim
from blockrelay_worker.scheduling.step_cost import StepCost, draft_rows, prompt_rows_beside
from blockrelay_worker.transport.stage_sender import Sender


class KnownRows:
    """Makes the batches of a first stage. Used by the engine thread only."""

    def __init__(
        self, role: StageRole, table: RunTable, sender: Sender, groups: Groups, metrics: WorkerMetrics
    ) -> None:
        self._role, self._table, self._sender, self._groups, self._metrics = role, table, sender, groups, metrics
        self._overcommits = role.last_stage  # nothing is reserved on a worker of the whole model

    def take(self, cost: StepCost) -> list[Work]:
        """The next batch; grows the page lists of its runs, and preempts younger runs where there are too few."""
        runs = {run.request: run for run in self._table.all() if run.missing}
        if not runs:
            return []
        candidates = {r.request: Candidate(r.request, r.missing, r.solo, r.served) for r in self._ready(runs)}
        groups, table = self._groups_now(), self._table.all()
        # Chunks of a pipeline are shorter: the next stage can begin earlier.
        most = self._role.max_rows if groups == 1 else max(1, self._role.max_rows // (2 * groups))
        flights = _flights(table)
        chosen = dict(
            choose_rows(
                list(candidates.values()),
                most,
                most_decoding=None if self._role.last_stage else decode_share(flights, groups),
                prompt_rows=prompt_rows_beside(cost, self._role.step_share_s, most) if flights else None,
            )
        )
        work: list[Work] = []
        decoding = sum(1 for request, rows in chosen.items() if runs[request].missing == rows == 1)
        speculates = self._role.speculates and decoding == len(chosen)  # beside prompts no row is cheap
        drafts_left = draft_rows(cost, decoding) if speculates else 0
        for request, run in runs.items():  # oldest first, so that nobody is preempted who is in the batch already
            rows = chosen.get(request, 0)
            if not rows or run.missing != candidates[request].missing or not self._grow(run, run.computed + rows):
                continue  # not its turn, preempted just now, or no page left
            end = run.computed + rows
            samples = end == len(run.tokens)
            tokens = run.tokens[run.computed : end]
            drafts: list[int] = []
            if samples and rows == 1 and drafts_left:
                drafts = self._drafts(run, -(-drafts_left // max(1, decoding)))
                drafts_left -= len(drafts)
                decoding -= 1
            work.append(
                Work(run=run, position=run.computed, tokens=tokens + drafts, samples=samples, drafts=len(drafts))
            )
        return work

    def claimable_pages(self) -> int:
        """Pages that new jobs may take; means something only where nothing is reserved."""
        return claimable_pages(self._holdings(), self._table.pool.free_pages)

    def _ready(self, runs: dict[str, Run]) -> list[Run]:
        """Runs that may compute: not held up by a full inbox or, before their first page, by too few pages."""
        if self._overcommits:
            if all(run.pages for run in runs.values()):
                return list(runs.values())
            allowed = startable(self._holdings(), self._table.pool.free_pages)
            ready = [run for run in runs.values() if run.request in allowed]
            for run in ready:
                if not run.adopted:
                    self._table.adopt(run)
            return [run for run in ready if run.missing]
        full = self._sender.full_targets()
        return [r for r in runs.values() if r.missing == 1 or r.route[1] not in full]

    def _groups_now(self) -> int:
        if self._role.last_stage:
            return 1
        return self._groups.of(frozenset(worker for run in self._table.all() for worker in run.route))

    def _grow(self, run: Run, tokens: int) -> bool:
        while not self._table.grow(run, tokens):
            # Where pages are reserved, those of a run that has just ended elsewhere come back with its note.
            # A run whose pages are being loaded cannot give them back at once.
            holdings = [h for h in self._holdings() if not self._table.is_loading(h.request)]
            name = victim(holdings, run.request) if self._overcommits else None
            if name is None:
                return False
            self._table.preempt(next(r for r in self._table.all() if r.request == name))
            self._metrics.preemptions.inc()
        return True

    def _holdings(self) -> list[Holding]:
        return [Holding(r.request, len(r.pages), pages_for(len(r.tokens) + 1)) for r in self._table.all()]

    def _drafts(self, run: Run, most: int) -> list[int]:
        """Guesses behind the last known token, with pages for them; none for tensor steps."""
        if run.body.logits != "none" or run.solo:
            return []
        if run.drafter is None:
            run.drafter = Drafter()
        # The token after the last draft must still be wanted, or its row was in vain.
        limit = min(run.prompt_length + run.params.max_tokens, self._role.folder.model.max_position)
        drafts = run.drafter.draft(run.tokens, min(most, limit - len(run.tokens) - 1))
        return drafts if drafts and self._table.grow(run, len(run.tokens) + len(drafts)) else []


def _flights(table: Sequence[Run]) -> list[int | None]:
    """Of each request that decodes: the iteration whose batch carries it through the other stages; None: it is here."""
    return [None if r.missing else r.served for r in table if r.missing <= 1 and not r.ended and not r.loading]

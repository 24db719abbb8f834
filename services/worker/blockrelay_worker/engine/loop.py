"""The engine loop of one stage: take events, choose rows, run the stage, pass the result on.

One thread owns runs, pages and executor. Commits happen behind the step (committer), signs of life beside it (beat).
What can fail ends in RERUN or FINISH of the requests concerned, never of their neighbours.
"""

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import ExecutionError, WireError
from blockrelay.failpoints import reach
from blockrelay.observability.logs import get
from blockrelay.observability.metrics import WorkerMetrics
from blockrelay.protocol import transitions
from blockrelay.protocol.messages import Commit, CommitAnswer, Ended, Forward, NextJob, RerunReason
from blockrelay_worker.engine.commit_builder import next_tokens, tensor_end
from blockrelay_worker.engine.intake import Arrivals
from blockrelay_worker.engine.quarantine import Trials, apart
from blockrelay_worker.engine.runs import Run, RunTable
from blockrelay_worker.engine.work import Work
from blockrelay_worker.execution.batch import Batch, Segment, StageOutput
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.kv.store.store import Loaded
from blockrelay_worker.lifecycle.drain import Departure
from blockrelay_worker.lifecycle.stage_role import StageRole
from blockrelay_worker.scheduling.first_stage import KnownRows
from blockrelay_worker.scheduling.later_stage import ArrivedRows
from blockrelay_worker.scheduling.micro_batches import Groups
from blockrelay_worker.scheduling.step_cost import StepCost, observed
from blockrelay_worker.scheduling.throughput import PaceMeter
from blockrelay_worker.transport.committer import Committer
from blockrelay_worker.transport.events import Event, Gone, Mailbox, Orphan, Restarted, Verdicts, Wake
from blockrelay_worker.transport.redis_links import Links, Stopping
from blockrelay_worker.transport.stage_sender import Sender
from blockrelay_worker.transport.tensor_results import Results

#: How long the loop waits for an event when there is nothing to compute.
IDLE_WAIT_S = 0.2
#: The same while rows wait for pages or for room in the next inbox, which no event tells.
HELD_WAIT_S = 0.005
#: How long a request that is tried alone may take to commit what it was tried for.
TRIAL_COMMIT_S = 2.0


class Engine:
    """Runs one stage until the worker is gone or asked to stop."""

    def __init__(
        self,
        role: StageRole,
        executor: Executor,
        table: RunTable,
        links: Links,
        mailbox: Mailbox,
        metrics: WorkerMetrics,
    ) -> None:
        self.role, self.table, self.links, self.mailbox, self.metrics = role, table, links, mailbox, metrics
        self._executor = executor
        self._committer = Committer(links, mailbox, metrics)
        self._results = Results(links, self._committer)
        self._arrivals = Arrivals(role, links, table)
        self._sender = Sender(role, links, metrics)
        self._known = KnownRows(role, table, self._sender, Groups(links), metrics)
        self._arrived = ArrivedRows(role, self._arrivals)
        self._stage_seconds = metrics.stage_seconds.labels(role.stage, role.device)
        self._cost = StepCost()
        self.pace = PaceMeter()
        self._trials = Trials(links, role.worker)
        self._claim_due = role.first_stage
        self._iteration = 0
        self._departure = Departure(links, role.worker)
        self._log = get()
        self._tell_metrics()

    def step_age(self) -> float:
        """Seconds the current step has computed, its waiting for Redis aside; 0 between steps. For the beat thread."""
        return self.links.clock.age()

    def run(self) -> str:
        """Loop until stopped, drained or gone; why. Afterwards every run is forgotten and nothing is in flight."""
        self._committer.start()
        self._results.start()
        moved = False
        try:
            while not self.links.stop.is_set():
                for event in self.mailbox.take(0.0) if moved or self._claim_due else self._wait():
                    if isinstance(event, Gone):
                        return event.why
                    self._handle(event)
                if self.links.drain.asked:
                    self._claim_due = False
                    if self._departure.over(len(self.table)):
                        return "drained"
                elif self._claim_due:
                    self._claim()
                started = self.links.clock.begin()
                self.pace.look(started, len(self.table))
                self._end_overdue(started)
                moved = self._compute()
                self.links.clock.end()
                if moved:
                    self.metrics.busy_seconds.inc(time.monotonic() - started)
            return "stopped"
        except Stopping:
            return "stopped"
        finally:
            self.links.clock.end()
            self._results.flush(1.0)
            self._results.close()
            self._committer.flush(2.0)
            self._committer.close()
            self._arrived.clear()
            self.table.clear()

    # --- events ---

    def _handle(self, event: Event) -> None:
        match event:
            case Wake():
                self._claim_due = self.role.first_stage
            case NextJob():
                if not self._arrivals.next_job(event):
                    self._rerun_id(event.request, event.run, "missing_pages")
            case Ended():
                self._forget(event.request, event.run)
            case Forward():
                self._arrived.add(event)
            case Verdicts(answers):
                for commit, answer in answers:
                    self._on_verdict(commit, answer)
            case Loaded():
                self.table.loaded(event)
            case Orphan(request, run):
                self._rerun_id(request, run, "forgotten")
            case Restarted():
                self._on_restart()
            case Gone():
                raise AssertionError("handled by run()")

    def _on_verdict(self, commit: Commit, answer: CommitAnswer) -> None:
        run = self.table.get(commit.request, commit.run)
        if answer.verdict == "OK":
            if run is not None and commit.end:
                self._forget(commit.request, commit.run)
            return
        self._log.warning("COMMIT_REFUSED", request_id=commit.request, verdict=answer.verdict, length=answer.length)
        if answer.verdict in ("GAP", "DIVERGED"):
            # The log is the truth: the next run starts from what it says.
            self._rerun_id(commit.request, commit.run, "restart")
        self._forget(commit.request, commit.run)

    def _on_restart(self) -> None:
        """Another Redis process: forget all runs, and run again whatever it believes is here."""
        self._log.warning("REDIS_RESTARTED", runs=len(self.table))
        self.table.clear()
        self._arrived.clear()
        for request, run in (self.links.insist(transitions.beat(self.role.worker)) or {}).items():
            if run:
                self._rerun_id(request, run, "restart")
        self._claim_due = self.role.first_stage

    def _end_overdue(self, now: float) -> None:
        """No step for a request whose deadline has passed: its client does not want the rest."""
        for run in [run for run in self.table.all() if run.until is not None and now > run.until]:
            self.links.insist(transitions.finish(run.request, "expired", run=run.run))
            self._forget(run.request, run.run)

    def _forget(self, request: str, run: str) -> None:
        if self.table.drop(request, run):
            self._claim_due = self.role.first_stage

    def _rerun_id(self, request: str, run: str, reason: RerunReason, block: str = "") -> None:
        """RERUN, as a fallback when `block` names where a GPU failed; then forget the run here."""
        if self.links.insist(transitions.rerun(request, run, reason, block=block)):
            self.metrics.reruns.labels(reason).inc()
            if block:
                self.metrics.fallbacks.labels(block, "GPU", "CPU", reason).inc()
                moved = {"block": block, "from": "GPU", "to": "CPU", "reason": reason}
                self._log.warning("BLOCK_EXECUTION_FALLBACK", **self._names(request, run), **moved)
        self._forget(request, run)

    def _names(self, request: str, run: str) -> dict[str, Any]:
        """What a log line about a run carries beside its data."""
        known = self.table.get(request, run)
        session = {"session_id": known.body.session, "step": known.body.step} if known and known.body.session else {}
        return {"request_id": request, **session}

    def _fail(self, run: Run, message: str, code: str, block: str | None) -> None:
        meta = {
            "error": message,
            "code": code,
            "failed_block": block or "",
            "device": self.role.device,
            "execution_times": run.passing,
            "route": list(run.route),
        }
        names = self._names(run.request, run.run)
        self._log.error("PIPELINE_EXECUTION_FAILED", **names, error=message, failed_block=block)
        self.links.insist(transitions.finish(run.request, "error", meta=meta, run=run.run))
        self._forget(run.request, run.run)

    def _claim(self) -> None:
        self._claim_due = False
        room = self.role.max_requests - len(self.table)
        if room <= 0:
            return
        most = min(room, 16)
        free = self._known.claimable_pages()
        call = transitions.claim(self.role.worker, most, dead_after_s=self.role.dead_after_s, free_pages=free)
        claimed = self.links.insist(call)
        for job in claimed:
            try:
                self._arrivals.claimed(job)
            except WireError as error:
                self._log.error("REQUEST_BODY_REFUSED", request_id=job.request, error=str(error))
                meta = {"error": str(error), "code": "wire"}
                self.links.insist(transitions.finish(job.request, "error", meta=meta, run=job.run))
            self.metrics.queue_wait.observe(job.waited_s)
        if any(job.solo for job in claimed):
            self._trials.over()
        self._claim_due = len(claimed) == most or any(job.solo for job in claimed)  # what is tried alone comes alone

    # --- one step ---

    def _wait(self) -> list[Event]:
        """The next events, after a round without work."""
        held = self.role.first_stage and any(run.missing for run in self.table.all())
        started, occupied = time.monotonic(), len(self.table) > 0
        events = self.mailbox.take(HELD_WAIT_S if held else IDLE_WAIT_S)
        if occupied:
            self.metrics.idle_seconds.inc(time.monotonic() - started)
        return events

    def _compute(self) -> bool:
        """One iteration; False when there was nothing that could be computed."""
        if self.role.first_stage:
            work = self._known.take(self._cost)
        else:
            work, refused = self._arrived.take(self._cost)
            for segment in refused:
                self._rerun_id(segment.request, segment.run, "missing_pages")
        if not work:
            return False
        self._iteration += 1
        for batch in apart(work):
            if batch[0].alone:
                with self._trials.of(batch[0].run.request):
                    self._step(batch)
                    self._results.flush(TRIAL_COMMIT_S)
            else:
                self._step(batch)
        return True

    def _step(self, work: list[Work]) -> None:
        """Run the stage on `work` and pass the result on. A batch that fails on a CPU is tried again one by one."""
        try:
            reach("worker.before_compute", (token for w in work for token in w.tokens))
            output = self._run_stage(work)
            reach("worker.after_compute")
        except ExecutionError as error:
            self._on_failure(work, error)
            return
        bad = {work[i].run.request for i in output.not_finite}
        prompt_rows = 0
        for item in [w for w in work if not (w.drafts and w.run.request in bad)]:
            run = item.run
            run.computed = item.known_end if self.role.first_stage else item.position + item.rows
            run.served = self._iteration
            if self.role.last_stage:
                run.add_seconds(run.passing)
                run.add_seconds(output.seconds)
            if self.role.first_stage:
                prompt_rows += max(0, min(run.prompt_length, item.known_end) - item.position)
        self.metrics.prompt_tokens.inc(prompt_rows)
        if output.logits is not None:
            self._commit(_split(work, output.logits, [len(w.wanted_rows()) for w in work]), bad)
        elif output.hidden is not None:
            parts = _split(work, output.hidden, [w.rows for w in work])
            self._forward([part for part in parts if part[0].run.request not in bad], output.seconds)
        failed = [w for w in work if w.run.request in bad]
        for item in [w for w in failed if not w.drafts]:
            where = f"block_{self.role.first} to block_{self.role.last}"
            self._fail(
                item.run, f"a row became NaN or infinite in {where}", "row_not_finite", f"block_{self.role.last}"
            )
        for item in work:
            if item.run.request not in bad and self.table.get(item.run.request, item.run.run) is item.run:
                self.table.seal(item.run, None if self.role.last_stage else item.known_end)
        for item in [w for w in failed if w.drafts]:
            self._step([item.without_drafts()])  # a guess may be what overflowed, and nobody asked for it

    def _on_failure(self, work: list[Work], error: ExecutionError) -> None:
        names = [item.run.request for item in work]
        self._log.error("BLOCK_EXECUTION_FAILED", error=str(error), block=error.block, requests=names)
        if self.role.device == "gpu":
            for item in work:
                self._rerun_id(item.run.request, item.run.run, "gpu_error", error.block or f"block_{self.role.first}")
        elif len(work) == 1:
            self._fail(work[0].run, str(error), "execution_error", error.block)
        else:
            for item in work:
                self._step([item])

    def _run_stage(self, work: list[Work]) -> StageOutput:
        segments = [Segment(rows=w.rows, first_position=w.position, pages=w.run.pages) for w in work]
        wanted: list[int] = []
        at = 0
        for item in work:
            if self.role.last_stage:
                wanted += [at + i for i in item.wanted_rows()]
            at += item.rows
        started = time.monotonic()
        if self.role.first_stage:
            tokens = np.array([token for w in work for token in w.tokens], np.int32)
            output = self._executor.run(Batch(segments=segments, tokens=tokens, wanted=wanted))
        else:
            hidden = np.concatenate([w.hidden for w in work if w.hidden is not None])
            output = self._executor.run(Batch(segments=segments, hidden=hidden, wanted=wanted))
        seconds = time.monotonic() - started
        decode_rows = sum(w.rows for w in work if w.decodes)
        self._cost = observed(self._cost, decode_rows=decode_rows, prompt_rows=at - decode_rows, seconds=seconds)
        self._stage_seconds.observe(seconds)
        self.metrics.batch_rows.observe(at)
        self.pace.add(rows=at - decode_rows, tokens=sum(1 for w in work if w.samples))
        self.metrics.block_seconds.observe(output.seconds, self.role.device)
        return output

    def _forward(self, parts: list[tuple[Work, NDArray[np.float32]]], seconds: dict[str, float]) -> None:
        """Rows to the next stage. What was guessed stays noted until COMMIT tells which guesses were right."""
        if self.role.first_stage:
            for item, _ in parts:
                item.run.drafts = tuple(item.tokens[item.rows - item.drafts :])
        for lost in self._sender.forward(parts, seconds):
            self._rerun_id(lost.run.request, lost.run.run, "no_inbox")

    def _commit(self, parts: list[tuple[Work, NDArray[np.float32]]], bad: set[str]) -> None:
        """Choose tokens from the wanted logits of each Work and hand them to the committer."""
        commits: list[Commit] = []
        announced: list[tuple[str, Commit]] = []
        generated = 0
        for item, logits in parts:
            run = item.run
            if run.request in bad:
                continue
            if run.body.logits != "none":
                if logits.size:
                    run.logits.append(logits.copy())
                if item.samples:
                    self._results.submit(run.logits, tensor_end(run, self.role))
            elif item.samples:
                del run.tokens[item.known_end :]  # a later stage learned the drafts with their rows
                commit = next_tokens(run, item.tokens[item.rows - item.drafts :], logits, self.role)
                self._count(run, item.drafts, len(commit.tokens))
                generated += len(commit.tokens)
                commits.append(commit)
                if not commit.end and len(run.route) > 1:
                    announced.append((run.route[0], commit))
        if announced:
            self._sender.announce(announced)
        self._committer.submit(commits)
        self.metrics.generation_tokens.inc(generated)

    def _count(self, run: Run, drafts: int, tokens: int) -> None:
        if drafts:
            self.metrics.draft_tokens.inc(drafts)
            self.metrics.accepted_tokens.inc(tokens - 1)
            if run.drafter is not None:
                run.drafter.verdict(drafts, tokens - 1)

    def _tell_metrics(self) -> None:
        """What gauges say when somebody asks; setting them after every step would cost more than the step's loop."""
        table, pool, metrics = self.table, self.table.pool, self.metrics
        metrics.running.set_function(lambda: len(table))
        metrics.waiting.set_function(lambda: sum(1 for run in table.all() if not run.missing))
        metrics.kv_pages_used.set_function(lambda: pool.used_pages)
        metrics.kv_pages_cached.set_function(lambda: pool.cached_pages)
        metrics.kv_cache_usage.set_function(lambda: pool.used_pages / pool.pages)


def _split(work: list[Work], rows: NDArray[np.float32], counts: list[int]) -> list[tuple[Work, NDArray[np.float32]]]:
    """Cut `rows` into consecutive parts of `counts` rows, one per Work (views)."""
    ends = np.cumsum(counts)
    return [(w, rows[end - count : end]) for w, end, count in zip(work, ends, counts, strict=True)]

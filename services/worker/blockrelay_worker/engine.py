"""The engine loop of one stage: take events, choose rows, run the stage, pass the result on.

One thread owns runs, pages and executor. Commits happen behind the step (committer), signs of life beside it (beat).
What can fail ends in RERUN or FINISH of the requests concerned, never of their neighbours.
"""

import time
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockrelay import scripts
from blockrelay.errors import ExecutionError
from blockrelay.logs import get
from blockrelay.messages import Commit, CommitAnswer, Ended, Forward, ForwardSegment, NextJob, RerunReason
from blockrelay.metrics import WorkerMetrics
from blockrelay.tensors import encode_result
from blockrelay_worker.arrivals import Arrivals
from blockrelay_worker.batch import Batch, Segment, StageOutput
from blockrelay_worker.batching import Candidate, choose_rows
from blockrelay_worker.committer import Committer
from blockrelay_worker.faults import Executor
from blockrelay_worker.links import Links, Stopping
from blockrelay_worker.mailbox import Event, Gone, Mailbox, Orphan, Restarted, Verdicts, Wake
from blockrelay_worker.outcome import next_token, tensor_end
from blockrelay_worker.runs import Run, RunTable
from blockrelay_worker.sender import Sender
from blockrelay_worker.stage import StageRole
from blockrelay_worker.work import Work

#: How long the loop waits for an event when there is nothing to compute.
IDLE_WAIT_S = 0.2
#: The same while rows wait for pages or for room in the next inbox, which no event tells.
HELD_WAIT_S = 0.005


@dataclass(frozen=True, slots=True)
class Waiting:
    """Rows of one segment that arrived and were not computed yet, and the message they came with."""

    segment: ForwardSegment
    hidden: NDArray[np.float32]
    message: Forward


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
        self._arrivals = Arrivals(role, links, table)
        self._sender = Sender(role, links, metrics)
        self._waiting: deque[Waiting] = deque()
        self._claim_due = role.first_stage
        self._iteration = 0
        self._step_started: float | None = None
        self._log = get()

    def step_age(self) -> float:
        """Seconds the current step runs already; 0 between steps. Read by the beat thread."""
        started = self._step_started
        return 0.0 if started is None else time.monotonic() - started

    def run(self) -> str:
        """Loop until stopped ("stopped") or gone (why). Afterwards every run is forgotten and nothing is in flight."""
        self._committer.start()
        moved = False
        try:
            while not self.links.stop.is_set():
                for event in self.mailbox.take(0.0 if moved or self._claim_due else self._patience()):
                    if isinstance(event, Gone):
                        return event.why
                    self._handle(event)
                if self._claim_due:
                    self._claim()
                self._step_started = time.monotonic()
                moved = self._compute()
                self._step_started = None
                self._observe()
            return "stopped"
        except Stopping:
            return "stopped"
        finally:
            self._step_started = None
            self._committer.flush(2.0)
            self._committer.close()
            self._waiting.clear()
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
                at = 0
                for segment in event.segments:
                    rows = event.rows[at : at + len(segment.token_ids)]
                    self._waiting.append(Waiting(segment, rows, event))
                    at += len(segment.token_ids)
            case Verdicts(answers):
                for commit, answer in answers:
                    self._on_verdict(commit, answer)
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
        self._waiting.clear()
        for request, run in (self.links.insist(scripts.beat(self.role.worker)) or {}).items():
            if run:
                self._rerun_id(request, run, "restart")
        self._claim_due = self.role.first_stage

    def _forget(self, request: str, run: str) -> None:
        if self.table.drop(request, run):
            self._claim_due = self.role.first_stage

    def _rerun_id(self, request: str, run: str, reason: RerunReason, block: str = "") -> None:
        """RERUN, with a fallback event when `block` names where a GPU failed; then forget the run here."""
        event = None
        if block:
            event = {"block_id": block, "from": "GPU", "to": "CPU", "reason": reason, "success": True}
        if self.links.insist(scripts.rerun(request, run, reason, fallback=event)):
            self.metrics.reruns.labels(reason).inc()
            if event:
                self.metrics.fallbacks.labels(block, "GPU", "CPU", reason).inc()
                self._log.warning("BLOCK_EXECUTION_FALLBACK", request_id=request, **event)
        self._forget(request, run)

    def _fail(self, run: Run, message: str, code: str, block: str | None) -> None:
        meta = {
            "error": message,
            "code": code,
            "failed_block": block or "",
            "device": self.role.device,
            "execution_times": run.passing,
            "route": list(run.route),
        }
        self._log.error("PIPELINE_EXECUTION_FAILED", request_id=run.request, error=message, failed_block=block)
        self.links.insist(scripts.finish(run.request, "error", meta=meta, run=run.run))
        self._forget(run.request, run.run)

    def _claim(self) -> None:
        self._claim_due = False
        room = self.role.max_requests - len(self.table)
        if room <= 0:
            return
        most = min(room, 16)
        claimed = self.links.insist(scripts.claim(self.role.worker, most, dead_after_s=self.role.dead_after_s))
        for job in claimed:
            self._arrivals.claimed(job)
            self.metrics.queue_wait.observe(job.waited_s)
        self._claim_due = len(claimed) == most

    # --- one step ---

    def _patience(self) -> float:
        """How long to wait for an event after a round without work."""
        held = self.role.first_stage and any(run.missing for run in self.table.all())
        return HELD_WAIT_S if held else IDLE_WAIT_S

    def _compute(self) -> bool:
        """One iteration; False when there was nothing that could be computed."""
        work = self._from_tokens() if self.role.first_stage else self._from_rows()
        if not work:
            return False
        self._iteration += 1
        self._step(work)
        return True

    def _step(self, work: list[Work]) -> None:
        """Run the stage on `work` and pass the result on. A batch that fails on a CPU is tried again one by one."""
        try:
            output = self._run_stage(work)
        except ExecutionError as error:
            names = [item.run.request for item in work]
            self._log.error("BLOCK_EXECUTION_FAILED", error=str(error), block=error.block, requests=names)
            if self.role.device == "gpu":
                for item in work:
                    self._rerun_id(
                        item.run.request, item.run.run, "gpu_error", error.block or f"block_{self.role.first}"
                    )
            elif len(work) == 1:
                self._fail(work[0].run, str(error), "execution_error", error.block)
            else:
                for item in work:
                    self._step([item])
            return
        bad = {work[i].run.request for i in output.not_finite}
        for item in work:
            item.run.computed = item.position + item.rows
            item.run.served = self._iteration
            item.run.add_seconds(item.run.passing)
            item.run.add_seconds(output.seconds)
            if self.role.first_stage:
                self.metrics.prompt_tokens.inc(max(0, min(item.run.prompt_length - item.position, item.rows)))
        if output.logits is not None:
            self._commit(_split(work, output.logits, [len(w.wanted_rows()) for w in work]), bad)
        elif output.hidden is not None:
            parts = [
                (w, rows) for w, rows in _split(work, output.hidden, [w.rows for w in work]) if w.run.request not in bad
            ]
            for lost in self._sender.forward(parts, output.seconds):
                self._rerun_id(lost.run.request, lost.run.run, "no_inbox")
        for item in [w for w in work if w.run.request in bad]:
            where = f"block_{self.role.first} to block_{self.role.last}"
            self._fail(
                item.run, f"a row became NaN or infinite in {where}", "row_not_finite", f"block_{self.role.last}"
            )

    def _from_tokens(self) -> list[Work]:
        """The first stage's rows: known tokens whose KV is missing."""
        full = self._sender.full_targets() if not self.role.last_stage else frozenset[str]()
        runs = {run.request: run for run in self.table.all() if run.missing}
        candidates = [
            Candidate(r.request, r.missing, r.solo, r.served)
            for r in runs.values()
            if r.missing == 1 or r.route[1:2] == () or r.route[1] not in full
        ]
        work: list[Work] = []
        for request, rows in choose_rows(candidates, self.role.max_rows):
            run = runs[request]
            end = run.computed + rows
            if not self.table.grow(run, end):
                continue  # pages of a run that has just ended elsewhere are still held: they come back with its note
            tokens = run.tokens[run.computed : end]
            work.append(Work(run=run, position=run.computed, tokens=tokens, samples=end == len(run.tokens)))
        return work

    def _from_rows(self) -> list[Work]:
        """A later stage's rows: what the stage before sent, in order, each request once, at most `max_rows`."""
        work: list[Work] = []
        later: deque[Waiting] = deque()
        taken: set[str] = set()
        rows = 0
        while self._waiting:
            item = self._waiting.popleft()
            segment = item.segment
            if (rows and rows + item.hidden.shape[0] > self.role.max_rows) or segment.request in taken:
                taken.add(segment.request)  # keep the order of one request's segments
                later.append(item)
                continue
            run = self._arrivals.segment(segment)
            if run == "rerun":
                self._rerun_id(segment.request, segment.run, "missing_pages")
            elif run != "drop":
                taken.add(segment.request)
                rows += item.hidden.shape[0]
                run.passing, run.gpu_blocks = item.message.block_seconds, item.message.gpu_blocks
                ids, hidden = segment.token_ids, item.hidden
                work.append(
                    Work(run=run, position=segment.position, tokens=ids, hidden=hidden, samples=segment.ends_known)
                )
        self._waiting = later
        return work

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
            tokens = np.concatenate([np.asarray(w.tokens, np.int32) for w in work])
            output = self._executor.run(Batch(segments=segments, tokens=tokens, wanted=wanted))
        else:
            hidden = np.concatenate([w.hidden for w in work if w.hidden is not None])
            output = self._executor.run(Batch(segments=segments, hidden=hidden, wanted=wanted))
        self.metrics.stage_seconds.labels(self.role.stage, self.role.device).observe(time.monotonic() - started)
        self.metrics.batch_rows.observe(at)
        for block, seconds in output.seconds.items():
            self.metrics.block_seconds.labels(block, self.role.device).observe(seconds)
        return output

    def _commit(self, parts: list[tuple[Work, NDArray[np.float32]]], bad: set[str]) -> None:
        """Choose tokens from the wanted logits of each Work and hand them to the committer."""
        commits: list[Commit] = []
        for item, logits in parts:
            run = item.run
            if run.request in bad:
                continue
            if run.body.logits != "none":
                if logits.size:
                    run.logits.append(logits.copy())
                if item.samples:
                    self._store_result(run)
                    commits.append(tensor_end(run, self.role))
            elif item.samples:
                commits.append(next_token(run, logits[-1], self.role))
                self.metrics.generation_tokens.inc()
        self._committer.submit(commits)

    def _store_result(self, run: Run) -> None:
        """Tensor outputs go to the payload Redis before the COMMIT that announces them."""
        key, value = self.links.keys.result(run.request), encode_result(np.concatenate(run.logits))
        self.links.again(lambda: self.links.payload.set(key, value, ex=self.role.retention_s))

    def _observe(self) -> None:
        runs = self.table.all()
        self.metrics.running.set(len(runs))
        self.metrics.waiting.set(sum(1 for r in runs if not r.missing))
        self.metrics.kv_pages_used.set(self.table.pool.used_pages)
        self.metrics.kv_cache_usage.set(self.table.pool.used_pages / self.table.pool.pages)


def _split(work: list[Work], rows: NDArray[np.float32], counts: list[int]) -> list[tuple[Work, NDArray[np.float32]]]:
    """Cut `rows` into consecutive parts of `counts` rows, one per Work (views)."""
    ends = np.cumsum(counts)
    return [(w, rows[end - count : end]) for w, end, count in zip(work, ends, counts, strict=True)]

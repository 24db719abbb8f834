"""The engine loop of one stage: take events, claim jobs, choose rows, take a step.

One thread owns runs, KV pages and executor. The committer thread commits behind the step; another sends heartbeats.
"""

import time

from blockrelay.block_folder.model import ModelConfig
from blockrelay.errors import WireError
from blockrelay.observability.logs import get
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.messages import Commit, CommitAnswer, Ended, Forward, NextJob
from blockrelay.protocol.transitions import calls
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_worker.engine.care import Care
from blockrelay_worker.engine.hand_over import HandOver
from blockrelay_worker.engine.intake import Intake
from blockrelay_worker.engine.quarantine import Quarantine
from blockrelay_worker.engine.run_endings import Endings
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.engine.step import Steps
from blockrelay_worker.engine.step_reports import StepReports
from blockrelay_worker.engine.token_commits import TokenCommits
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.kv.run_table import RunTable
from blockrelay_worker.policy import EARLY_S, HELD_WAIT_S, IDLE_WAIT_S
from blockrelay_worker.runs.kv_load import Loaded
from blockrelay_worker.sampling.row_sampler import Sampler
from blockrelay_worker.scheduling.first_stage import FirstStageBatcher
from blockrelay_worker.scheduling.guesses import Guesser
from blockrelay_worker.scheduling.later_stage import LaterStageBatcher
from blockrelay_worker.scheduling.route_members import RouteMembers
from blockrelay_worker.states import WorkerMachine
from blockrelay_worker.transport.committer import Committer
from blockrelay_worker.transport.events import DeviceEnded, Event, Gone, MovesOn, Orphan, Restarted, Verdicts, Wake
from blockrelay_worker.transport.local_rows.links import LocalLinks
from blockrelay_worker.transport.mailbox import Mailbox
from blockrelay_worker.transport.redis_links import Links, Stopping
from blockrelay_worker.transport.stage_sender import StageSender
from blockrelay_worker.transport.tensor_results import TensorResultWriter

#: Why an engine ended whose steps ran out of memory, as `Engine.run` returns it.
OUT_OF_MEMORY = "memory ran out"


class Engine:
    """Runs one stage until the worker ends its registration or loses its device.

    It ends the registration when the process should stop, after a drain, when it was declared dead, when its payload
    inbox is gone, and when the plan gives it another stage: then it drains too, and passes its requests on to the
    workers of that plan.
    """

    def __init__(
        self,
        role: StageRole,
        model: ModelConfig,
        tokenizer: Tokenizer | None,
        executor: Executor,
        table: RunTable,
        links: Links,
        mailbox: Mailbox[Event],
        metrics: WorkerMetrics,
        state: WorkerMachine,
        sampler: Sampler,
        care: Care | None = None,
        local: LocalLinks | None = None,
        guesser: Guesser | None = None,
    ) -> None:
        """`state` is the worker's state machine. It must be idle when `run` is called, which drives it from then on.

        `tokenizer` finds stop strings; None if no request has any. Other threads put events into `mailbox`. `sampler`
        draws tokens, in the last stage. `care` looks after the device between steps, if the device needs that. `local`
        sends rows to workers of this host through shared memory. `guesser` guesses tokens ahead, in a first stage; it
        is closed at the end of `run`.
        """
        self._care = care
        self._state = state
        self.role, self.table, self.links, self.mailbox, self.metrics = role, table, links, mailbox, metrics
        self._committer = Committer(links, mailbox, metrics)
        self._results = TensorResultWriter(links, self._committer)
        self._intake = Intake(role, model, tokenizer, links, table, metrics)
        self._sender = StageSender(links, metrics, local)
        self._first = FirstStageBatcher(
            role.limits,
            table,
            RouteMembers(links.read_worker, role.limits),
            self._sender.full_targets,
            metrics,
            whole_model=role.last_stage,
            guesser=guesser,
        )
        self._later = LaterStageBatcher(role.limits, self._intake.segment)
        self._reports = StepReports(role, links, model.name)
        self._quarantine = Quarantine(links, role.worker_id)
        self._endings = Endings(role, links, table, metrics, self._room_came)
        self._steps = Steps(
            role,
            executor,
            table,
            self._endings,
            self._quarantine,
            self._sender,
            TokenCommits(role, sampler, self._endings, self._sender, self._committer, self._results, metrics),
            self._results,
            self._reports,
            metrics,
            state,
        )
        #: The worker's pace in prompt tokens and tokens, which its heartbeats report.
        self.pace = self._steps.pace
        #: The times of the stage's blocks, which they report too.
        self.blocks = self._steps.blocks
        #: The id of the grammars that this worker reads; "": none.
        self.grammar_id = self._intake.grammar_id
        self._claim_due = role.first_stage
        self._hand_over: HandOver | None = None  # of a first stage that moves on
        self._log = get()
        self._register_gauges()

    def run(self) -> str:
        """Runs until the worker is stopped, drained or gone, or its device is lost or renewed. Returns why, for logs.

        Call it once: it starts the threads that commit and report, and ends them. They get a few seconds for what is
        under way, and may outlive it if Redis does not answer. Afterwards the table is empty. A wait for Redis that
        ends with the process counts as stopped: Stopping is not raised. Raises ExecutionError if the device works, but
        cannot read the KV pages of a request that became NaN or infinite.
        """
        self._committer.start()
        self._results.start()
        self._reports.start()
        moved = False
        try:
            while not self.links.stop.is_set():
                for event in self.mailbox.take(0.0) if moved or self._claim_due else self._wait():
                    if isinstance(event, Gone):
                        return event.why
                    self._handle(event)
                if self._state.state != "draining" and (
                    self.links.drain.is_requested or (self._care and self._care.renews)
                ):
                    self._state.on("drain")
                if self._state.state == "draining":
                    self._claim_due = False
                    if self._hand_over is not None and not self.links.drain.is_requested:  # its successor drains too
                        self._hand_over.go_on()
                    if self._endings.all_ended():
                        return "drained"
                    if self._care and self._care.leaves_now:
                        return "the device is renewed"
                elif self._claim_due:
                    self._claim()
                started = self.links.clock.begin()
                self.pace.look(started, len(self.table))
                self._end_overdue(started)
                moved = self._compute()
                if self._care and not self._steps.lost:
                    self._steps.look_after(self._care)
                self.links.clock.end()
                if self._steps.lost:
                    return str(self._steps.lost)
                if self._steps.out_of_memory:
                    return OUT_OF_MEMORY
                if moved:
                    self.metrics.busy_seconds.inc(time.monotonic() - started)
                    self.metrics.cache_management_seconds.inc(self.table.cache_seconds)
                    self.table.cache_seconds = 0.0
                else:
                    self._rest()
            return "stopped"
        except Stopping:
            return "stopped"
        finally:
            self.links.clock.end()
            self._results.flush(1.0)
            self._results.close()
            self._reports.close()
            self._committer.flush(2.0)
            self._committer.close()
            self._later.clear()
            self._first.close()
            self.table.clear()

    # --- events ---

    def _handle(self, event: Event) -> None:
        """Handles one event of the mailbox."""
        match event:
            case Wake():
                self._claim_due = self.role.first_stage
            case NextJob():
                if not self._intake.next_job(event):
                    self._endings.rerun(event.request_id, event.run_id, "missing_pages")
            case Ended():
                self._endings.forget(event.request_id, event.run_id, again=event.again)
            case Forward():
                self._later.add(event)
            case Verdicts(answers):
                for commit, answer in answers:
                    self._on_verdict(commit, answer)
            case Loaded():
                self.table.loaded(event)
            case Orphan(request, run):
                self._endings.rerun(request, run, "forgotten")
            case Restarted():
                self._on_restart()
            case DeviceEnded():
                pass  # only ends the wait: `look_after` at the end of the round detects the loss
            case MovesOn(departure):
                if departure.begin():
                    self._move_on()
            case Gone():
                raise AssertionError("handled by run()")

    def _on_verdict(self, commit: Commit, answer: CommitAnswer) -> None:
        """Drops a run that has ended, or whose commit was refused; runs it again if its log and the commit disagree."""
        run = self.table.get(commit.request_id, commit.run_id)
        if answer.verdict == "OK":
            if run is not None and commit.end:
                self._endings.forget(commit.request_id, commit.run_id)
            return
        self._log.warning("COMMIT_REFUSED", request_id=commit.request_id, verdict=answer.verdict, length=answer.length)
        if answer.verdict in ("GAP", "DIVERGED"):
            # The token log is the truth: the next run starts from it.
            self._endings.rerun(commit.request_id, commit.run_id, "restart")
        self._endings.forget(commit.request_id, commit.run_id)

    def _on_restart(self) -> None:
        """Drops all runs after a restart of the control Redis, and runs those again that its records place here."""
        self._log.warning("REDIS_RESTARTED", runs=len(self.table))
        self.table.clear()
        self._later.clear()
        for request_id, run_id in self._endings.unseen().items():
            self._endings.rerun(request_id, run_id, "restart")
        self._claim_due = self.role.first_stage

    def _move_on(self) -> None:
        """Begins the drain of a worker that has another stage in a plan whose workers serve now."""
        if self._state.state != "draining":
            self._state.on("drain")
        if self.role.first_stage:
            self._hand_over = HandOver(self.table, self.links, self._endings)

    def _end_overdue(self, now: float) -> None:
        """Ends requests whose deadline has passed at `now` (monotonic seconds)."""
        for run in [run for run in self.table.all() if run.is_overdue(now)]:
            answer = self.links.run_until_reachable(calls.finish(run.request_id, "expired", run_id=run.run_id))
            if answer == "EARLY":  # the clock of Redis, which decides, was put back since CLAIM: time is left
                run.deadline = now + EARLY_S
            else:
                self._endings.forget(run.request_id, run.run_id)

    def _room_came(self) -> None:
        self._claim_due = self.role.first_stage

    def _claim(self) -> None:
        """Claims up to 16 jobs, as far as there is room, and creates their runs. Undecodable ones end with an error."""
        self._claim_due = False
        room = self.role.max_requests - len(self.table)
        if room <= 0:
            return
        limit = min(room, 16)
        free = self._first.claimable_pages()
        call = calls.claim(self.role.worker_id, limit, free_pages=free)
        claimed = self.links.run_until_reachable(call)
        for job in claimed:
            try:
                self._intake.claimed(job)
            except WireError as error:
                self._log.error("REQUEST_BODY_REFUSED", request_id=job.request_id, error=str(error))
                meta = {"error": str(error), "code": "wire"}
                self.links.run_until_reachable(calls.finish(job.request_id, "error", meta=meta, run_id=job.run_id))
            self.metrics.queue_wait.observe(job.waited_s)
        quarantined = any(job.quarantined for job in claimed)
        if quarantined:
            self._quarantine.clear()
        self._claim_due = len(claimed) == limit or quarantined  # CLAIM gives a quarantined request alone

    def _wait(self) -> list[Event]:
        """Returns the next events after a round without work; waits for the first up to IDLE_WAIT_S or HELD_WAIT_S."""
        held = self.role.first_stage and any(run.missing for run in self.table.all())
        started, occupied = time.monotonic(), len(self.table) > 0
        events = self.mailbox.take(HELD_WAIT_S if held else IDLE_WAIT_S)
        if occupied:
            self.metrics.idle_seconds.inc(time.monotonic() - started)
        return events

    def _compute(self) -> bool:
        """Runs one step. False when no row could be computed."""
        if self.role.first_stage:
            work = self._first.take(self._steps.cost)
        else:
            work, refused = self._later.take(self._steps.cost)
            for segment in refused:
                tokens = self._intake.reusable(segment)
                self._endings.rerun(segment.request_id, segment.run_id, "missing_pages", reusable=tokens)
        if work:
            if self._state.state in ("idle", "waiting"):
                self._state.on("rows_ready")
            self.links.clock.allowed_s = self._steps.patience_s(work)
            self._steps.run(work)
        return bool(work)

    def _rest(self) -> None:
        """Updates the worker's state after a round without rows to compute."""
        state = self._state.state
        if state in ("idle", "computing") and len(self.table):
            self._state.on("rows_missing")
        elif state in ("computing", "waiting") and not len(self.table):
            self._state.on("runs_ended")

    def _register_gauges(self) -> None:
        """Has gauges computed at each scrape: setting them after every step would cost more than the step's loop."""
        table, pool, metrics = self.table, self.table.pool, self.metrics
        metrics.running.set_function(lambda: len(table))
        metrics.waiting.set_function(lambda: sum(1 for run in table.all() if not run.missing))
        metrics.kv_pages_used.set_function(lambda: pool.used_pages)
        metrics.kv_pages_cached.set_function(lambda: pool.cached_pages)
        metrics.kv_cache_usage.set_function(lambda: pool.used_pages / pool.pages)

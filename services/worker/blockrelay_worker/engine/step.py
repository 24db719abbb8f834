"""One step: runs batches through the stage and hands the results to COMMIT or to the next stage.

A failure ends in RERUN or FINISH of the requests that it concerns, never of others in the batch.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from blockrelay.errors import DeviceFailed, DeviceLost, ExecutionError
from blockrelay.failpoints import reach
from blockrelay.observability.logs import get
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.encoding.named_tensors import why_not_sent
from blockrelay.protocol.plan import CPU, GPU
from blockrelay_worker.engine.block_meter import BlockMeter
from blockrelay_worker.engine.care import Care
from blockrelay_worker.engine.quarantine import Quarantine, is_quarantined, separated
from blockrelay_worker.engine.rows.batch_builder import batch_of, split, wanted_rows, within_logits
from blockrelay_worker.engine.rows.forward_builder import Part, forwards
from blockrelay_worker.engine.rows.spoiled_rows import SpoiledRows
from blockrelay_worker.engine.run_endings import Endings
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.engine.step_reports import StepReports
from blockrelay_worker.engine.token_commits import TokenCommits
from blockrelay_worker.execution.batch import Batch, StageOutput
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.kv.requested_kv import read_requested
from blockrelay_worker.kv.run_table import RunTable
from blockrelay_worker.policy import EXPORT_S, OUT_OF_MEMORY_TWICE_S, QUARANTINE_COMMIT_S
from blockrelay_worker.runs.run import Run
from blockrelay_worker.scheduling.step_cost import StepCost, observed, patience_s
from blockrelay_worker.scheduling.throughput import PaceMeter
from blockrelay_worker.scheduling.work import Work
from blockrelay_worker.states import ENGINE, EngineEvent, EngineMachine, EngineState, WorkerMachine, failure_event
from blockrelay_worker.transport.stage_sender import StageSender
from blockrelay_worker.transport.tensor_results import TensorResultWriter


@dataclass(slots=True, eq=False)
class InFlight:
    """The batch that the engine works on. `states.ENGINE` has the states that are named here."""

    work: list[Work]
    began_ns: int
    """When it was taken, in nanoseconds of the monotonic clock."""
    batch: Batch | None = None
    """The executor's input; None until the state Scheduling has built it."""
    error: ExecutionError | None = None
    """Why the batch failed; set in the state Error alone."""


class Steps:
    """Runs steps, one after the other, and measures them.

    `cost` is measured per step size, `pace` for admission, and `blocks` for plans.

    Used by the engine thread only. Waits for Redis; raises Stopping when the process should end meanwhile.
    """

    def __init__(
        self,
        role: StageRole,
        executor: Executor,
        table: RunTable,
        endings: Endings,
        quarantine: Quarantine,
        sender: StageSender,
        tokens: TokenCommits,
        results: TensorResultWriter,
        reports: StepReports,
        metrics: WorkerMetrics,
        worker_state: WorkerMachine,
    ) -> None:
        self._worker_state, self._state = worker_state, EngineMachine(ENGINE)
        metrics.states.show(self._state)
        self._role, self._executor, self._table, self._metrics = role, executor, table, metrics
        self._endings, self._quarantine, self._reports = endings, quarantine, reports
        self._spoiled = SpoiledRows(role, executor, table, endings)
        self._sender, self._tokens, self._results = sender, tokens, results
        self._stage_seconds = metrics.stage_seconds.labels(role.stage, role.device)
        self._actions: Mapping[EngineState, Callable[[], EngineEvent | None]] = {
            "Idle": self._next,
            "Scheduling": self._dispatch,
            "WaitingWorker": self._compute,
            "Error": self._roll_back,
        }
        self._number = 0
        self._batches: deque[list[Work]] = deque()  # of this step, not begun yet
        self._now = InFlight([], 0)
        self._log = get()
        #: The error that says that the device is gone, with all KV on it; None while it works.
        self.lost: DeviceLost | None = None
        self._without_memory = deque[float](maxlen=2)  # when steps ran out of memory (monotonic)
        self._step_without_memory = 0  # the number of the last one
        self._doubted = False  # the device computed NaN or infinity: check it with its canary
        self.cost = StepCost()
        self.pace = PaceMeter()
        self.blocks = BlockMeter(role.first)

    def run(self, work: list[Work]) -> None:
        """Runs one step on `work`: one batch for each quarantined request, then one for all others, or a few that score
        prompts.

        A failed batch raises nothing: it ends or moves requests, and a device that is gone sets `lost`. ExecutionError
        is raised only if the device works, but cannot read the KV pages of a request that became NaN or infinite, and
        if there is no memory to draw tokens in; MemoryError, if the process gets none. A state machine drives the step:
        the action of each state returns the event that leads to the next one.
        """
        self._number += 1
        for batch in separated(work):
            self._batches.extend(within_logits(batch))
        while (event := self._actions[self._state.state]()) is not None:
            self._state.on(event)

    @property
    def out_of_memory(self) -> bool:
        """Whether the worker should leave its stage, so that the cell changes to a smaller precision."""
        twice = self._without_memory
        return len(twice) == 2 and twice[1] - twice[0] < OUT_OF_MEMORY_TWICE_S

    def _note_memory(self, *, alone: bool) -> None:
        """Notes that a batch found no memory; `alone`: it had one request, so that no smaller batch is left to try.

        A device has to fail so in two steps; a CPU is out of memory at once.
        """
        if alone and (self._role.device == CPU or self._number != self._step_without_memory):
            self._step_without_memory = self._number
            self._without_memory += [time.monotonic()] * (2 if self._role.device == CPU else 1)

    def patience_s(self, work: list[Work]) -> float:
        """Seconds after which a step of `work` counts as stuck; at least the role's `step_limit_s`."""
        decode_tokens = sum(w.rows for w in work if w.decodes)
        prompt_tokens = sum(w.rows for w in work) - decode_tokens
        least_s = self._role.step_limit_s
        return patience_s(self.cost, decode_tokens=decode_tokens, prompt_tokens=prompt_tokens, least_s=least_s)

    def look_after(self, care: Care) -> None:
        """Does what the device needs between two steps. Sets `lost` if the device turns out to be gone."""
        try:
            if self._doubted:
                self._doubted = False
                care.doubt()
            care.between_steps()
        except DeviceLost as error:
            self._log.error("DEVICE_LOST_BETWEEN_STEPS", error=str(error), reason=error.reason)
            self._lose(error)

    def _lose(self, error: DeviceLost) -> None:
        """Has all runs continue elsewhere, those on this worker and those on their way to it."""
        self.lost = error
        self._metrics.device_losses.labels(error.reason).inc()
        self._endings.close()
        self._hand_over(self._table.all(), error)
        if self._role.device == GPU:
            for request_id, run_id in self._endings.unseen().items():
                self._endings.rerun(request_id, run_id, "gpu_error", self._block_of(error), error=error)

    def _hand_over(self, runs: list[Run], error: ExecutionError) -> None:
        """Moves runs off a device that failed.

        From a GPU they go to a CPU, which continues behind the last computed token if the pages can still be read.
        If the CPU's own ONNX Runtime process ended, they run again on a worker of this stage.
        """
        for run in runs:
            reusable = None
            if run.private and not self.lost:
                self._endings.wait_for_log(run, EXPORT_S)
                self._table.export(run, EXPORT_S)
                reusable = run.computed
            if self._role.device == CPU:  # a CPU has no stand-in: any worker of the stage may continue
                alone = run.request_id == self._quarantine.now
                self._endings.rerun(run.request_id, run.run_id, "death", reusable=reusable, alone=alone)
                continue
            self._endings.rerun(
                run.request_id, run.run_id, "gpu_error", self._block_of(error), reusable=reusable, error=error
            )

    def _block_of(self, error: ExecutionError) -> str:
        return error.block or f"block_{self._role.first}"

    # --- what each state does ---

    def _next(self) -> EngineEvent | None:
        """Idle: takes the step's next batch. None: the step is over, since none is left or the device is gone."""
        if self._quarantine.now:
            self._results.flush(QUARANTINE_COMMIT_S)
            self._quarantine.leave()
        if self.lost or self.out_of_memory:
            self._batches.clear()
        if not self._batches:
            self._now = InFlight([], 0)  # its rows may be large
            return None
        work = self._batches.popleft()
        if is_quarantined(work[0]):
            self._quarantine.enter(work[0].run.request_id)
        self._now = InFlight(work, time.monotonic_ns())
        return "batch_ready"

    def _dispatch(self) -> EngineEvent:
        """Scheduling: builds what the executor gets."""
        self._reports.tell_start(self._now.work)
        try:
            self._now.batch = batch_of(self._now.work, self._role)
        except ExecutionError as error:
            return self._failed(error)
        return "dispatch_ok"

    def _compute(self) -> EngineEvent:
        """WaitingWorker: has the executor compute the batch, and passes the results on."""
        work, batch = self._now.work, self._now.batch
        assert batch is not None
        try:
            reach("worker.before_compute", (token for w in work for token in w.tokens))
            output = self._executor.run(batch)
            self._measure(output)
            kv_fields = self._requested_kv(work)
            reach("worker.after_compute")
        except ExecutionError as error:
            return self._failed(error)
        self._reports.tell_end(work, self._now.began_ns, output)
        self._pass_on(work, output, kv_fields)
        return "worker_done"

    def _failed(self, error: ExecutionError) -> EngineEvent:
        self._now.error = error
        self._reports.tell_end(self._now.work, self._now.began_ns, None)
        return failure_event(error)

    def _roll_back(self) -> EngineEvent:
        """Error: gives up requests of the batch, or has parts of it tried next (`after_failure`)."""
        work, error = self._now.work, self._now.error
        assert error is not None
        names = [item.run.request_id for item in work]
        self._log.error("BLOCK_EXECUTION_FAILED", error=str(error), block=error.block, requests=names)
        self._worker_state.on("failed")
        given_up, again = after_failure(work, error, gpu=self._role.device == GPU)
        if self._role.leaves_without_memory and failure_event(error) == "oom" and not isinstance(error, DeviceLost):
            self._note_memory(alone=len(work) == 1)
        if isinstance(error, DeviceLost):
            self._lose(error)
        elif given_up and self._role.device == GPU:
            self._hand_over([item.run for item in given_up], error)
        elif given_up and not self.out_of_memory:  # else it goes on elsewhere, when the worker has left
            self._endings.fail(given_up[0].run, str(error), "execution_error", error.block, error.seconds)
        self._worker_state.on("recovered")
        self._batches.extendleft(reversed(again))
        return "rollback_done"

    # --- results ---

    def _pass_on(self, work: list[Work], output: StageOutput, kv_fields: dict[str, dict[str, bytes]]) -> None:
        """Hands the results of a batch to COMMIT or the next stage.

        A request with a row that is not finite is tried again without its drafts. Without drafts it moves or ends.
        """
        bad = {work[i].run.request_id for i in output.not_finite}
        prompt_tokens = 0
        for item in [w for w in work if w.run.request_id not in bad] if bad else work:
            run = item.run
            run.tokens_computed(item.known_end if self._role.first_stage else item.position + item.rows)
            run.last_step = self._number
            if run.last is not None:
                run.last.add_seconds(run.block_seconds_before)
                run.last.add_seconds(output.seconds)
                run.last.sessions = output.sessions
            if self._role.first_stage:
                prompt_tokens += max(0, min(run.prompt_length, item.known_end) - item.position)
        self._metrics.prompt_tokens.inc(prompt_tokens)
        passing_on = time.perf_counter()
        for request_id, fields in kv_fields.items():
            if request_id not in bad:
                self._results.store_kv(request_id, fields)
        logits = output.logits if output.rows is None else output.rows
        if logits is not None:
            self._tokens.commit(split(work, logits, [len(wanted_rows(w)) for w in work]), bad)
            self._metrics.token_generation_seconds.inc(time.perf_counter() - passing_on)
        else:
            self._forward(
                [part for part in _handed_on(work, output) if part[0].run.request_id not in bad], output.seconds
            )
            self._metrics.state_transfer_seconds.inc(time.perf_counter() - passing_on)
        failed = [w for w in work if w.run.request_id in bad]
        for item in [w for w in failed if not w.drafts]:
            if not self.lost:
                self._on_not_finite(item)
        for item in work:
            if item.run.request_id not in bad and self._table.get(item.run.request_id, item.run.run_id) is item.run:
                self._table.publish(item.run, None if self._role.last_stage else item.known_end)
        # The draft may be what overflowed: the request did not ask for it.
        self._batches.extendleft([item.without_drafts()] for item in reversed(failed) if item.drafts)

    def _on_not_finite(self, item: Work) -> None:
        """Ends or moves a request of which a row became NaN or infinite."""
        self._doubted = self._doubted or self._role.device == GPU
        try:
            wrong = self._spoiled.for_a_cpu(item)
            if wrong is None:
                self._spoiled.end(item)
            else:
                self._hand_over([item.run], wrong)
        except DeviceLost as error:
            self._lose(error)

    def _measure(self, output: StageOutput) -> None:
        """Notes what the batch cost, which the executor has just computed."""
        work, seconds = self._now.work, (time.monotonic_ns() - self._now.began_ns) / 1e9
        rows, decode_tokens = sum(w.rows for w in work), sum(w.rows for w in work if w.decodes)
        self.cost = observed(
            self.cost, decode_tokens=decode_tokens, prompt_tokens=rows - decode_tokens, seconds=seconds
        )
        self._stage_seconds.observe(seconds)
        self._metrics.inference_seconds.inc(seconds)
        self._metrics.inferences.inc()
        self._metrics.batch_rows.observe(rows)
        self.blocks.add(work, output.seconds)
        self.pace.add(rows=rows - decode_tokens, tokens=sum(1 for w in work if w.samples))
        self._metrics.block_seconds.observe(output.seconds, self._role.device, str(output.estimated).lower())

    def _requested_kv(self, work: list[Work]) -> dict[str, dict[str, bytes]]:
        """KV of this stage that clients asked for, by request id and field, for requests whose last token is here."""
        fields_by_request = {
            item.run.request_id: read_requested(
                self._executor, self._role.first, layers, item.run.pages[: pages_for(item.known_end)]
            )
            for item in work
            if item.samples and (layers := item.run.body.kv_asked)
        }
        return {request_id: fields for request_id, fields in fields_by_request.items() if fields}

    def _forward(self, parts: list[Part], seconds: dict[str, float]) -> None:
        """Sends rows, or named tensors, to the next stage. Those that cannot be sent fail or run again.

        They are encoded at once, since they are buffers that the executor reuses. A run's drafts stay noted until
        COMMIT tells which of them were right.
        """
        sent: list[Part] = []
        for item, made in parts:
            if item.run.first is not None:
                item.run.first.drafts = tuple(item.tokens[item.rows - item.drafts :])
            if why := "" if isinstance(made, np.ndarray) else why_not_sent(made):
                block = f"block_{self._role.last}"
                message = f"{block} hands on for {item.rows} rows what no message can hold: {why}"
                self._endings.fail(item.run, message, "execution_error", block)
            else:
                sent.append((item, made))
        for target, forward, carried in forwards(sent, seconds, self._role):
            if not self._sender.forward(target, forward):
                for lost in carried:
                    self._endings.rerun(lost.run.request_id, lost.run.run_id, "no_inbox")


def after_failure(work: list[Work], error: ExecutionError, *, gpu: bool) -> tuple[list[Work], list[list[Work]]]:
    """Decides what follows a failed batch: what is given up here, and the batches to try next, in order. Pure.

    A device without room gets the two halves of the batch. A device that refused the batch, or a CPU, gets each
    request alone: one that fails alone is at fault, and is given up. All is given up after the loss of the device
    (also of a CPU's ONNX Runtime process), and after any other failure of a GPU.
    """
    if len(work) == 1 or isinstance(error, DeviceLost) or (gpu and not isinstance(error, DeviceFailed)):
        return work, []
    if isinstance(error, DeviceFailed) and error.capacity:
        half = -(-len(work) // 2)
        return [], [work[:half], work[half:]]
    return [], [[item] for item in work]


def _handed_on(work: list[Work], output: StageOutput) -> list[Part]:
    """The output of each Work in a stage that is not the last: hidden rows (views), or named tensors."""
    if output.tensors is not None:
        return list(zip(work, output.tensors, strict=True))
    assert output.hidden is not None, "a stage gives logits, rows or tensors"
    return list(split(work, output.hidden, [w.rows for w in work]))

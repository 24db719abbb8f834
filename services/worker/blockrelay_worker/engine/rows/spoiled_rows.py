"""Handles rows that became NaN or infinite: a CPU computes them instead, or the request ends with an error."""

from dataclasses import replace

from blockrelay.errors import DeviceFailed, DeviceLost, ExecutionError
from blockrelay.observability.logs import get
from blockrelay.protocol.plan import GPU
from blockrelay_worker.engine.rows.batch_builder import batch_of
from blockrelay_worker.engine.run_endings import Endings
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.execution.batch import BlockFault
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.fallback_reason import WRONG_WHEN_FAILED
from blockrelay_worker.kv.finite_pages import finite_tokens
from blockrelay_worker.kv.run_table import RunTable
from blockrelay_worker.scheduling.work import Work


class SpoiledRows:
    """Decides what becomes of requests with NaN or infinite rows.

    Used by the engine thread only, after the step that gave the rows. Methods raise DeviceLost if the device turns out
    to be gone. They wait for Redis and raise Stopping when the process should end meanwhile.
    """

    def __init__(self, role: StageRole, executor: Executor, table: RunTable, endings: Endings) -> None:
        self._role, self._executor, self._table, self._endings = role, executor, table, endings
        self._stage = f"a row became NaN or infinite in block_{role.first} to block_{role.last}"

    def for_a_cpu(self, item: Work) -> DeviceFailed | None:
        """Returns the failure with which the request moves to a CPU; None if a CPU computed it, or none may take it.

        The caller then moves the request, or calls `end`. Removes the pages with such rows from the prefix cache;
        `item.run.computed` falls to the tokens before those pages. Raises ExecutionError if they cannot be read.
        """
        self._table.distrust(item.run, self._finite(item))
        if self._role.device != GPU or not self._endings.cpu_may_take(item.run):
            return None
        get().error("BLOCK_EXECUTION_FAILED", error=self._stage, block=None, requests=[item.run.request_id])
        return DeviceFailed(self._stage, reason=WRONG_WHEN_FAILED, code="INTERNAL", capacity=False)

    def end(self, item: Work) -> None:
        """Fails the request and names the block at fault, which is found by running its rows block by block.

        Names none if that fails, or if every block then gives finite rows.
        """
        run, fault = item.run, None
        try:
            fault = self._fault(item)
        except DeviceLost:
            raise
        except ExecutionError as error:
            get().warning("BLOCK_NOT_NAMED", request_id=run.request_id, error=str(error))
        if fault is None:
            message, block, seconds = f"{self._stage}, and not again when these ran one by one", None, {}
        else:
            message, block, seconds = f"a row became NaN or infinite in {fault.block}", fault.block, fault.seconds
        if self._role.device == GPU:
            denied = run.body.fallback == "deny"
            message += ", and fallback: deny keeps the request off CPUs" if denied else ", and no CPU is there"
        self._endings.fail(run, message, "row_not_finite", block, seconds)

    def _finite(self, item: Work) -> int:
        """Number of leading tokens of the run whose KV pages are finite.

        A step checks only the logits that it returns, so an earlier step can have stored NaN for prompt tokens.
        """
        run = item.run
        if item.position >= run.prompt_length or item.position <= run.kv.cached:
            return run.computed
        return finite_tokens(self._executor, run.pages, run.computed, known=run.kv.cached)

    def _fault(self, item: Work) -> BlockFault | None:
        """Returns the first block whose output is not finite, None if all are; raises ExecutionError.

        Runs the rows from the first token on whose page is not finite.
        """
        run, work = item.run, [item]
        if self._role.first_stage and run.computed < item.position:
            max_rows = self._role.limits.max_rows
            starts = range(run.computed, item.position, max_rows)
            rows = [run.tokens[start : min(start + max_rows, item.position)] for start in starts]
            parts = zip(starts, rows, strict=True)
            work = [replace(item, position=start, tokens=part, samples=False) for start, part in parts] + work
        faults = (self._executor.first_not_finite(batch_of([part], self._role)) for part in work)
        return next((fault for fault in faults if fault is not None), None)

"""Rows that became NaN or infinite: whether a CPU computes them instead, or which block ends their request."""

from dataclasses import replace

from blockrelay.errors import DeviceFailed, DeviceLost, ExecutionError
from blockrelay.observability.logs import get
from blockrelay_worker.engine.rows.batch_builder import batch_of
from blockrelay_worker.engine.run import Run
from blockrelay_worker.engine.run_endings import Endings
from blockrelay_worker.engine.run_table import RunTable
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.execution.batch import BlockFault
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.fallback_reason import WRONG_WHEN_FAILED
from blockrelay_worker.kv.finite_pages import finite_tokens
from blockrelay_worker.scheduling.work import Work


class SpoiledRows:
    """Used by the engine thread only, behind the step that gave them. Raises DeviceLost where that is found out."""

    def __init__(self, role: StageRole, executor: Executor, table: RunTable, endings: Endings) -> None:
        self._role, self._executor, self._table, self._endings = role, executor, table, endings
        self._stage = f"a row became NaN or infinite in block_{role.first} to block_{role.last}"

    def for_a_cpu(self, item: Work[Run]) -> DeviceFailed | None:
        """Why the request goes on at a CPU; None where a CPU has computed the rows, or no CPU may or can. Nobody finds
        pages with such rows any more."""
        self._table.distrust(item.run, self._finite(item))
        if self._role.device != "gpu" or not self._endings.cpu_may_take(item.run):
            return None
        get().error("BLOCK_EXECUTION_FAILED", error=self._stage, block=None, requests=[item.run.request])
        return DeviceFailed(self._stage, reason=WRONG_WHEN_FAILED, code="INTERNAL", capacity=False)

    def end(self, item: Work[Run]) -> None:
        """FINISH with the block that it was, which running the request's rows block by block tells."""
        run, fault = item.run, None
        try:
            fault = self._fault(item)
        except DeviceLost:
            raise
        except ExecutionError as error:
            get().warning("BLOCK_NOT_NAMED", request_id=run.request, error=str(error))
        if fault is None:
            said, block, seconds = f"{self._stage}, and not again when these ran one by one", None, {}
        else:
            said, block, seconds = f"a row became NaN or infinite in {fault.block}", fault.block, fault.seconds
        if self._role.device == "gpu":
            denied = run.body.fallback == "deny"
            said += ", and fallback: deny keeps the request off CPUs" if denied else ", and no CPU is there"
        self._endings.fail(run, said, "row_not_finite", block, seconds)

    def _finite(self, item: Work[Run]) -> int:
        """The number of leading tokens of the run whose KV pages are finite. Rows of a prompt whose logits are not
        wanted may have become NaN in an earlier step, unnoticed."""
        run = item.run
        if item.position >= run.prompt_length or item.position <= run.kv.cached:
            return run.computed
        return finite_tokens(self._executor, run.pages, run.computed, known=run.kv.cached)

    def _fault(self, item: Work[Run]) -> BlockFault | None:
        """The block that it was, looked for from the first token on whose page holds no numbers."""
        run, work = item.run, [item]
        if self._role.first_stage and run.computed < item.position:
            most = self._role.limits.max_rows
            starts = range(run.computed, item.position, most)
            rows = [run.tokens[start : min(start + most, item.position)] for start in starts]
            parts = zip(starts, rows, strict=True)
            work = [replace(item, position=start, tokens=part, samples=False) for start, part in parts] + work
        faults = (self._executor.first_not_finite(batch_of([part], self._role)) for part in work)
        return next((fault for fault in faults if fault is not None), None)

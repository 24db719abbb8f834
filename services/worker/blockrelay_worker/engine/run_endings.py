"""How runs leave this worker before their last token is committed: they run again elsewhere, or end with an error."""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from blockrelay.errors import DeviceLost, ExecutionError
from blockrelay.observability.logs import get
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.messages import RerunReason
from blockrelay.protocol.transitions import calls
from blockrelay_worker.engine.drain import close
from blockrelay_worker.engine.run import Run
from blockrelay_worker.engine.run_table import RunTable
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.execution.fallback_reason import fallback_reason
from blockrelay_worker.transport.redis_links import Links

#: How often the log is looked at for tokens that are on their way to it. Seconds.
LOOK_S = 0.002


class Endings:
    """Used by the engine thread only. Waits for Redis; raises Stopping when the process should end meanwhile.

    `on_room` is called whenever a run has left.
    """

    def __init__(
        self, role: StageRole, links: Links, table: RunTable, metrics: WorkerMetrics, on_room: Callable[[], None]
    ) -> None:
        self._role, self._links, self._table, self._metrics = role, links, table, metrics
        self._on_room, self._log = on_room, get()

    def forget(self, request: str, run_id: str) -> None:
        """Drop a run from the table, if it is there."""
        if self._table.drop(request, run_id):
            self._on_room()

    def wait_for_log(self, run: Run, timeout_s: float) -> None:
        """Return when the log has every token that is known here, or when that takes too long: the last ones may be on
        their way to it (`Sender.announce`), and a run that is over commits nothing."""
        links, give_up = self._links, time.monotonic() + timeout_s
        key, known = links.keys.request(run.request), len(run.tokens) - run.prompt_length
        while time.monotonic() < give_up:
            current, committed = links.retry_until_reachable(
                lambda: links.control.hmget(key, "run", "committed"), "read request"
            )
            if current != run.id.encode() or int(committed or 0) >= known:
                return
            links.stop.wait(LOOK_S)

    def close(self) -> None:
        """No route takes this worker from now on."""
        close(self._links, self._role.worker)

    def unseen(self) -> dict[str, str]:
        """Runs, by request, that have this worker in their route and are not here: no row of them has come yet."""
        here = {run.request for run in self._table.all()}
        known = self._links.run_until_reachable(calls.beat(self._role.worker)) or {}
        return {request: run for request, run in known.items() if run and request not in here}

    def rerun(
        self,
        request: str,
        run_id: str,
        reason: RerunReason,
        block: str = "",
        *,
        found: int | None = None,
        alone: bool = False,
        error: ExecutionError | None = None,
    ) -> None:
        """RERUN, as a fallback when `block` names where a GPU failed; then forget the run here. `found`: the
        next run looks for the pages of so many leading tokens alone, which are here, or were written. `alone` as of
        `calls.rerun`. `error` is what failed there: the event says its finer reason and its error code."""
        detail, code = fallback_reason(error)
        call = calls.rerun(
            request,
            run_id,
            reason,
            block=block,
            stage=self._role.stage,
            found=found,
            alone=alone,
            detail=detail,
            code=code,
            lost=isinstance(error, DeviceLost),
        )
        for event in self._links.run_until_reachable(call).fallbacks:
            self._metrics.fallbacks.labels(event.block_id, event.source, event.target, reason).inc()
            moved = {"block": event.block_id, "blocks": event.blocks, "from": event.source, "to": event.target}
            why = {"reason": event.reason, "error_code": event.error_code}
            self._log.warning("BLOCK_EXECUTION_FALLBACK", **self._names(request, run_id), **moved, **why)
        self.forget(request, run_id)

    def cpu_may_take(self, run: Run) -> bool:
        """Whether RERUN brings this stage of the run to a CPU: its client does not deny that, and it has not left a GPU
        before. Then it is at one again because no CPU is there."""
        if run.body.fallback == "deny":
            return False
        key = self._links.keys.request(run.request)
        told = self._links.retry_until_reachable(lambda: self._links.control.hget(key, "fallbacks"), "read request")
        events: list[dict[str, str]] = json.loads(cast(bytes, told)) if told else []
        here = {f"block_{index}" for index in range(self._role.first, self._role.last + 1)}
        return not any(event["block_id"] in here for event in events)

    def fail(
        self, run: Run, message: str, code: str, block: str | None, seconds: Mapping[str, float] | None = None
    ) -> None:
        """FINISH with an error, and forget the run here. `seconds` are what the blocks of this stage took up to
        `block`."""
        meta = {
            "error": message,
            "code": code,
            "failed_block": block or "",
            "device": self._role.device,
            "execution_times": {**run.block_seconds_before, **(seconds or {})},
            "route": list(run.route),
        }
        names = self._names(run.request, run.id)
        self._log.error("PIPELINE_EXECUTION_FAILED", **names, error=message, failed_block=block)
        self._links.run_until_reachable(calls.finish(run.request, "error", meta=meta, run=run.id))
        self.forget(run.request, run.id)

    def _names(self, request: str, run_id: str) -> dict[str, Any]:
        """What a log line about a run carries beside its data."""
        here = self._table.get(request, run_id)
        session = {"session_id": here.body.session, "step": here.body.step} if here and here.body.session else {}
        return {"request_id": request, **session}

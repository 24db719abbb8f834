"""Early ends of runs on this worker, before their last commit: they run again elsewhere, or fail with an error."""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from blockrelay.errors import DeviceLost, ExecutionError
from blockrelay.observability.logs import get
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.messages import RerunReason
from blockrelay.protocol.transitions import calls
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.execution.fallback_reason import fallback_reason
from blockrelay_worker.kv.run_table import RunTable
from blockrelay_worker.policy import LOG_POLL_S
from blockrelay_worker.runs.run import Run
from blockrelay_worker.transport.redis_links import Links


class Endings:
    """Ends runs of this worker: drops them, has them run again (RERUN), or fails them (FINISH).

    Used by the engine thread only. Waits for Redis; raises Stopping when the process should end meanwhile.
    `on_room` is called after each run that left the table.
    """

    def __init__(
        self, role: StageRole, links: Links, table: RunTable, metrics: WorkerMetrics, on_room: Callable[[], None]
    ) -> None:
        self._role, self._links, self._table, self._metrics = role, links, table, metrics
        self._on_room, self._log, self._draining = on_room, get(), False

    def forget(self, request_id: str, run_id: str, *, again: bool = False) -> None:
        """Drops a run from the table, if it is there. `again`: its request runs again and can use its KV pages."""
        if self._table.drop(request_id, run_id, again=again):
            self._on_room()

    def wait_for_log(self, run: Run, timeout_s: float) -> None:
        """Waits until the log has every token that is known here, at most `timeout_s` seconds.

        COMMIT may still be under way when the last stage has already announced the tokens to the first. Returns at
        once if another run has replaced this one, or the request has gone: then its commits are refused.
        """
        links, give_up = self._links, time.monotonic() + timeout_s
        key, known = links.keys.request(run.request_id), len(run.tokens) - run.prompt_length
        while time.monotonic() < give_up:
            current, committed = links.retry_until_reachable(
                lambda: links.control.hmget(key, "run", "committed"), "read request"
            )
            if current != run.run_id.encode() or int(committed or 0) >= known:
                return
            links.stop.wait(LOG_POLL_S)

    def close(self) -> None:
        """Marks this worker as draining in its registry record, so that no new route takes it."""
        record = self._links.keys.worker(self._role.worker_id)
        if self._links.retry_until_reachable(lambda: self._links.control.exists(record), "drain"):  # else it is dead
            self._links.retry_until_reachable(lambda: self._links.control.hset(record, "draining", 1), "drain")

    def all_ended(self) -> bool:
        """Returns whether a draining worker can leave: no run is here, and Redis knows none on its way here.

        The first call begins the drain: from then on no new route takes this worker. Redis knows none either if it
        holds this worker for dead.
        """
        if not self._draining:
            self.close()
            self._draining = True
            self._log.info("DRAIN_STARTED", worker=self._role.worker_id, runs=len(self._table))
        return not len(self._table) and not self._links.run_until_reachable(calls.heartbeat(self._role.worker_id))

    def unseen(self) -> dict[str, str]:
        """Run ids, by request id, of requests that are routed through this worker and have no run in the table.

        Empty if Redis holds this worker for dead.
        """
        here = {run.request_id for run in self._table.all()}
        known = self._links.run_until_reachable(calls.heartbeat(self._role.worker_id)) or {}
        return {request_id: run_id for request_id, run_id in known.items() if run_id and request_id not in here}

    def rerun(
        self,
        request_id: str,
        run_id: str,
        reason: RerunReason,
        block: str = "",
        *,
        reusable: int | None = None,
        alone: bool = False,
        error: ExecutionError | None = None,
    ) -> None:
        """Calls RERUN and drops the run here. A `block` names where a GPU failed: then it is a fallback to a CPU.

        If the request denies fallbacks, a GPU continues instead.
        `reusable`: the next run reuses the KV pages of at most that many leading tokens, which are here or were written
        to the page store. `alone`: no other request was computed when the computing process ended, so this one is to
        blame. `error` is the failure: the fallback event carries its detailed reason and its error code.
        """
        detail, code = fallback_reason(error)
        call = calls.rerun(
            request_id,
            run_id,
            reason,
            block=block,
            stage=self._role.stage,
            found=reusable,
            alone=alone,
            detail=detail,
            code=code,
            lost=isinstance(error, DeviceLost),
        )
        for event in self._links.run_until_reachable(call).fallbacks:
            self._metrics.fallbacks.labels(event.block_id, event.source, event.target, reason).inc()
            moved = {"block": event.block_id, "blocks": event.blocks, "from": event.source, "to": event.target}
            why = {"reason": event.reason, "error_code": event.error_code}
            self._log.warning("BLOCK_EXECUTION_FALLBACK", **self._names(request_id, run_id), **moved, **why)
        self.forget(request_id, run_id)

    def cpu_may_take(self, run: Run) -> bool:
        """Returns whether RERUN can move this stage of the run to a CPU.

        False if the client denies fallbacks, or if the request has left a GPU of this stage before: it is on a GPU
        again only because there is no CPU worker. Whether there is one now is not checked.
        """
        if run.body.fallback == "deny":
            return False
        key = self._links.keys.request(run.request_id)
        field = self._links.retry_until_reachable(lambda: self._links.control.hget(key, "fallbacks"), "read request")
        events: list[dict[str, str]] = json.loads(cast(bytes, field)) if field else []
        here = {f"block_{index}" for index in range(self._role.first, self._role.last + 1)}
        return not any(event["block_id"] in here for event in events)

    def fail(
        self, run: Run, message: str, code: str, block: str | None, seconds: Mapping[str, float] | None = None
    ) -> None:
        """Calls FINISH with an error and drops the run here. `block` is the block that failed, if known.

        `message` and `code` are the error that the client gets.
        `seconds`: execution time of each block of this stage up to `block`, by name.
        """
        meta = {
            "error": message,
            "code": code,
            "failed_block": block or "",
            "device": self._role.device,
            "execution_times": {**run.block_seconds_before, **(seconds or {})},
            "route": list(run.route),
        }
        names = self._names(run.request_id, run.run_id)
        self._log.error("PIPELINE_EXECUTION_FAILED", **names, error=message, failed_block=block)
        self._links.run_until_reachable(calls.finish(run.request_id, "error", meta=meta, run_id=run.run_id))
        self.forget(run.request_id, run.run_id)

    def _names(self, request_id: str, run_id: str) -> dict[str, Any]:
        """The fields of a log line that identify a run: request id, and session and step if it has a session."""
        here = self._table.get(request_id, run_id)
        session = {"session_id": here.body.session, "step": here.body.step} if here and here.body.session else {}
        return {"request_id": request_id, **session}

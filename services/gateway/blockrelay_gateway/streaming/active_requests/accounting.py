"""Counts active requests in metrics and logs.

Gauges count all requests that the gateway follows. Tokens, times and ends are counted by the gateway that accepted the
request, so that each is counted once.
"""

from collections.abc import Callable, Sequence
from typing import Any

from blockrelay.observability import logs
from blockrelay.protocol.messages import EndEntry, LogEntry, TokenEntry
from blockrelay_gateway.streaming.active_requests.active_request import ActiveRequest
from blockrelay_gateway.streaming.cell_links import CellLinks


class RequestAccounting:
    """Counts each step of an active request. Methods take the request as it was before the step."""

    def __init__(self, links: CellLinks, ended: Sequence[Callable[[ActiveRequest], None]] = ()) -> None:
        """`ended` are called with each request that ends, whichever gateway accepted it.

        They get it as it was before: its `end` is still None.
        """
        self._metrics, self._tenants, self._on_end = links.metrics, links.tenants, ended

    def started(self) -> None:
        """Counts a request that became active."""
        self._metrics.waiting_requests.inc()

    def dropped(self, active: ActiveRequest) -> None:
        """Takes a request that is no longer active out of the gauges, unless its end has done so."""
        if active.end is None:
            (self._metrics.running_requests if active.tokens else self._metrics.waiting_requests).dec()

    def received(self, active: ActiveRequest, entry: LogEntry, now: float) -> None:
        """Counts the next entry of a request's log, and notes the time of its first token.

        `now` is the time of the entry in seconds of the monotonic clock.
        """
        metrics, owned = self._metrics, active.owned
        if isinstance(entry, TokenEntry):
            if not active.entries:
                metrics.waiting_requests.dec()
                metrics.running_requests.inc()
                active.first = now
                if owned:
                    metrics.time_to_first_token.observe(now - active.started)
                    self._tenants.first_token(active.tenant, now - active.started)
            elif owned:
                metrics.inter_token_latency.observe(now - active.last_entry_at)
            if owned:
                metrics.generation_tokens.inc()
                self._tenants.tokens(active.tenant)
        else:
            (metrics.running_requests if active.entries else metrics.waiting_requests).dec()
            if owned:
                self._ended(active, entry, now)
            for tell in self._on_end:
                tell(active)

    def disconnected(self, active: ActiveRequest) -> None:
        """Counts a request whose last reader left before its end."""
        self._metrics.disconnected.inc()
        logs.get().info("CLIENT_DISCONNECTED", request_id=active.id, tokens=active.tokens)

    def _ended(self, active: ActiveRequest, end: EndEntry, now: float) -> None:
        self._metrics.requests.labels(end.reason).inc()
        self._metrics.e2e_latency.observe(now - active.started)
        self._metrics.prompt_length.observe(active.body.prompt.size)
        self._metrics.answer_length.observe(active.tokens)
        if active.first is not None:
            self._metrics.decode_time.observe(now - active.first)
        log = logs.get().bind(request_id=active.id, traceparent=active.body.traceparent or None)
        if active.body.session:
            log = log.bind(session_id=active.body.session, step=active.body.step)
        for event in end.fallbacks:
            self._metrics.fallbacks.labels(event.block_id, event.source, event.target, event.cause).inc()
            moved: dict[str, Any] = {"block": event.block_id, "from": event.source, "to": event.target}
            why = {"reason": event.reason, "error_code": event.error_code, "success": event.success}
            log.warning("BLOCK_EXECUTION_FALLBACK", **moved, blocks=event.blocks, **why)
        log.info(
            "PIPELINE_EXECUTION_COMPLETE",
            reason=end.reason,
            tokens=active.tokens,
            time=round(now - active.started, 6),
            fallbacks=len(end.fallbacks),
            error=end.meta.get("error"),
        )

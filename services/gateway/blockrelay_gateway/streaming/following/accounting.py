"""What metrics and the log say of followed requests. Requests of another gateway are that one's to count."""

from collections.abc import Callable, Sequence
from typing import Any

from blockrelay.observability import logs
from blockrelay.observability.metrics.gateway import GatewayMetrics
from blockrelay.observability.metrics.tenants import TenantMetrics
from blockrelay.protocol.messages import EndEntry, LogEntry, TokenEntry
from blockrelay_gateway.streaming.following.followed_request import FollowedRequest


class Accounting:
    """Called at each step of a followed request; `followed` is as it was before the step."""

    def __init__(
        self, metrics: GatewayMetrics, tenants: TenantMetrics, ended: Sequence[Callable[[FollowedRequest], None]] = ()
    ) -> None:
        """`ended` are told each end, of any gateway's requests."""
        self._metrics, self._tenants, self._told = metrics, tenants, ended

    def started(self) -> None:
        """One more is followed."""
        self._metrics.followed_waiting.inc()

    def dropped(self, followed: FollowedRequest) -> None:
        """It is no longer followed, and has perhaps not ended."""
        if followed.end is None:
            (self._metrics.followed_running if followed.tokens else self._metrics.followed_waiting).dec()

    def heard(self, followed: FollowedRequest, entry: LogEntry, now: float) -> None:
        """`entry` is the next of its log."""
        metrics, owned = self._metrics, followed.owned
        if isinstance(entry, TokenEntry):
            if not followed.entries:
                metrics.followed_waiting.dec()
                metrics.followed_running.inc()
                followed.first = now
                if owned:
                    metrics.time_to_first_token.observe(now - followed.started)
                    self._tenants.first_token(followed.tenant, now - followed.started)
            elif owned:
                metrics.inter_token_latency.observe(now - followed.heard)
            if owned:
                metrics.generation_tokens.inc()
                self._tenants.tokens(followed.tenant)
        else:
            (metrics.followed_running if followed.entries else metrics.followed_waiting).dec()
            if owned:
                self._ended(followed, entry, now)
            for tell in self._told:
                tell(followed)

    def disconnected(self, followed: FollowedRequest) -> None:
        """Its last reader has left before its end."""
        self._metrics.disconnected.inc()
        logs.get().info("CLIENT_DISCONNECTED", request_id=followed.id, tokens=followed.tokens)

    def _ended(self, followed: FollowedRequest, end: EndEntry, now: float) -> None:
        self._metrics.requests.labels(end.reason).inc()
        self._metrics.e2e_latency.observe(now - followed.started)
        self._metrics.prompt_length.observe(followed.body.prompt.size)
        self._metrics.answer_length.observe(followed.tokens)
        if followed.first is not None:
            self._metrics.decode_time.observe(now - followed.first)
        log = logs.get().bind(request_id=followed.id, traceparent=followed.body.traceparent or None)
        if followed.body.session:
            log = log.bind(session_id=followed.body.session, step=followed.body.step)
        for event in end.fallbacks:
            self._metrics.fallbacks.labels(event.block_id, event.source, event.target, event.cause).inc()
            moved: dict[str, Any] = {"block": event.block_id, "from": event.source, "to": event.target}
            why = {"reason": event.reason, "error_code": event.error_code, "success": event.success}
            log.warning("BLOCK_EXECUTION_FALLBACK", **moved, blocks=event.blocks, **why)
        log.info(
            "PIPELINE_EXECUTION_COMPLETE",
            reason=end.reason,
            tokens=followed.tokens,
            time=round(now - followed.started, 6),
            fallbacks=len(end.fallbacks),
            error=end.meta.get("error"),
        )

"""Sends spans to a trace server as OTLP over HTTP: OpenTelemetry's SDK samples, batches, sends and retries.

The SDK's own variables name the server and the sampler (docs/observability.md). This module is imported only if they
name an endpoint.
"""

import asyncio
import os
import threading
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE
from opentelemetry.sdk.resources import (
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from blockrelay import __version__
from blockrelay.protocol.constants import TRACE_STEPS
from blockrelay_gateway.policy import SPANS_FLUSH_S
from blockrelay_gateway.tracing.spans import SCHEMA_URL, Span, TraceIdentity

#: The most spans that wait to be sent, if no variable says: those of four requests with as many steps as are kept.
QUEUED = 4 * TRACE_STEPS
_SCOPE = InstrumentationScope("blockrelay", __version__, SCHEMA_URL)
_NANOSECONDS = 1000


class OtlpTraces:
    """Sends spans from a thread of its own. Spans that its queue has no room for, or that are refused, are lost."""

    def __init__(self, *, node: str) -> None:
        """`node` names this gateway. `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` win over the names set here."""
        own = {SERVICE_NAME: "blockrelay-gateway", SERVICE_INSTANCE_ID: node, SERVICE_VERSION: __version__}
        self._resource = Resource.create(own).merge(OTELResourceDetector().detect())
        self._sampler = TracerProvider(resource=self._resource, shutdown_on_exit=False).sampler
        self._exporter = OTLPSpanExporter()
        limit = None if OTEL_BSP_MAX_QUEUE_SIZE in os.environ else QUEUED
        self._sending = BatchSpanProcessor(self._exporter, max_queue_size=limit)

    def samples(self, identity: TraceIdentity, name: str) -> bool:
        """True if `OTEL_TRACES_SAMPLER` wants the trace; by default all but those whose client does not sample.

        `name` is the model's.
        """
        parent = TraceContextTextMapPropagator().extract({"traceparent": identity.traceparent})
        result = self._sampler.should_sample(parent, int(identity.trace_id, 16), name, trace.SpanKind.SERVER)
        return result.decision.is_sampled()

    def send(self, identity: TraceIdentity, spans: Sequence[Span]) -> None:
        """Queues all spans of a request for the sending thread; does not wait."""
        for span in spans:
            self._sending.on_end(self._readable(identity, span))

    async def close(self) -> None:
        """Sends the spans that are left, for at most SPANS_FLUSH_S: a silent trace server must not hold up the end."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def flush() -> None:
            self._sending.shutdown()
            if not loop.is_closed():
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=flush, name="traces-flush", daemon=True).start()
        try:
            async with asyncio.timeout(SPANS_FLUSH_S):
                await done.wait()
        except TimeoutError:
            self._exporter.shutdown()

    def _readable(self, identity: TraceIdentity, span: Span) -> ReadableSpan:
        """The span as the SDK's own type."""
        failed = trace.Status(trace.StatusCode.ERROR, span.error)
        return ReadableSpan(
            name=span.name,
            context=_context(identity, span.span_id),
            parent=_context(identity, span.parent_id, remote=span.server) if span.parent_id else None,
            resource=self._resource,
            attributes={**span.attributes, **({"error.type": span.error} if span.error else {})},
            events=[Event(event.name, event.attributes, event.at_us * _NANOSECONDS) for event in span.events],
            links=[trace.Link(_context(identity, span.after))] if span.after else (),
            kind=trace.SpanKind.SERVER if span.server else trace.SpanKind.INTERNAL,
            status=failed if span.error else trace.Status(),
            start_time=span.start_us * _NANOSECONDS,
            end_time=span.end_us * _NANOSECONDS,
            instrumentation_scope=_SCOPE,
        )


def _context(identity: TraceIdentity, span_id: str, *, remote: bool = False) -> trace.SpanContext:
    return trace.SpanContext(
        int(identity.trace_id, 16),
        int(span_id, 16),
        is_remote=remote,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
    )

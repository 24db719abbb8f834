"""A trace server that keeps what it is sent: OTLP over HTTP, read with OpenTelemetry's own messages."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.beside import serving


@dataclass
class TraceReceiver:
    """`spans` as they arrived, each with the attributes of its resource; `bodies` are what came over the wire."""

    url: str
    spans: list[tuple[dict[str, Any], Span]] = field(default_factory=list[tuple[dict[str, Any], Span]])
    bodies: list[bytes] = field(default_factory=list[bytes])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def named(self, name: str) -> list[Span]:
        """Spans of this name, or of `name` and a model, by when they begin."""
        with self.lock:
            found = [span for _, span in self.spans if span.name == name or span.name.startswith(f"{name} ")]
        return sorted(found, key=lambda span: span.start_time_unix_nano)


def attributes(span: Any) -> dict[str, Any]:
    """Of a span, an event or a resource."""
    told: dict[str, Any] = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        told[one.key] = [part.string_value for part in value.values] if kind == "array_value" else value
    return told


@contextmanager
def trace_receiver() -> Iterator[TraceReceiver]:
    """On a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            received.take(body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    class Received(TraceReceiver):
        def take(self, body: bytes) -> None:
            message = ExportTraceServiceRequest.FromString(body)
            with self.lock:
                self.bodies.append(body)
                for resource in message.resource_spans:
                    said = attributes(resource.resource)
                    self.spans += [(said, span) for scope in resource.scope_spans for span in scope.spans]

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received = Received(f"http://127.0.0.1:{server.server_address[1]}")
    with serving(server):
        yield received

"""`/livez`, `/readyz` and `/metrics` for services without a web framework, and a gateway's port for metrics alone."""

import contextlib
import json
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, cast

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from blockrelay.observability.logs import get

#: Connections at once. One more ends the oldest: who asks as one should is answered within milliseconds.
MOST = 16
#: How long a connection may last, and how many bytes its request may have.
DEADLINE_S, HEAD_BYTES = 5.0, 8192
_JSON = "application/json"
_PHRASES = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class StatusServer:
    """Serves from daemon threads until `close`. `port` 0 picks a free one; `.port` is the one in use.

    `gaps` answers readiness: a list of reasons why the service is not ready, empty when it is. Without it there is
    nothing here but the metrics.
    """

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, gaps: Callable[[], list[str]] | None = None
    ) -> None:
        self._server = _Server(host, port, registry, gaps)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingTCPServer):
    """A thread for each of at most MOST connections, none of which lasts longer than DEADLINE_S."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = MOST

    def __init__(self, host: str, port: int, registry: CollectorRegistry, gaps: Callable[[], list[str]] | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.registry, self.gaps = registry, gaps
        self._open: dict[socket.socket, float] = {}  # since when, the oldest first
        self._lock = threading.Lock()
        super().__init__((host, port), _Connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= 2 * MOST:  # those that were ended are still busy with their answers
                refused = True
            else:
                refused = False
                if len(self._open) >= MOST:
                    _end(next(iter(self._open)))
                self._open[request] = time.monotonic()
        if refused:
            super().shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Called twice a second: ends what has lasted too long."""
        with self._lock:
            for request, since in self._open.items():
                if time.monotonic() - since > DEADLINE_S:
                    _end(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no event; a fault of ours is."""
        if not isinstance(error := sys.exception(), OSError):
            get().error("STATUS_FAILED", error=repr(error))


class _Connection(socketserver.BaseRequestHandler):
    """One request and its answer."""

    request: socket.socket

    def handle(self) -> None:
        self.request.settimeout(DEADLINE_S)
        head = b""
        while b"\n\r\n" not in head and b"\n\n" not in head:
            part = self.request.recv(4096)
            head += part
            if not part or len(head) > HEAD_BYTES:
                return
        method, _, rest = head.partition(b"\n")[0].decode("latin-1").partition(" ")
        status, content_type, body = self._answer(rest.partition(" ")[0]) if method in ("GET", "HEAD") else _NO_METHOD
        lines = f"HTTP/1.1 {status} {_PHRASES[status]}\r\nContent-Type: {content_type}\r\n"
        lines += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self.request.sendall(lines.encode() + (b"" if method == "HEAD" else body))

    def _answer(self, target: str) -> tuple[int, str, bytes]:
        server = cast(_Server, self.server)
        match target.partition("?")[0]:
            case "/metrics":
                return 200, CONTENT_TYPE_LATEST, generate_latest(server.registry)
            case "/livez" if server.gaps is not None:
                return 200, _JSON, b'{"status": "ok"}'
            case "/readyz" if server.gaps is not None:
                reasons = server.gaps()
                said = {"status": "not ready" if reasons else "ready", "reasons": reasons}
                return 503 if reasons else 200, _JSON, json.dumps(said).encode()
            case _:
                return 404, _JSON, b'{"error": "not found"}'


_NO_METHOD = (405, _JSON, b'{"error": "GET and HEAD only"}')


def _end(request: socket.socket) -> None:
    """Whatever its thread reads or writes ends at once; the thread closes it."""
    with contextlib.suppress(OSError):  # the client was quicker
        request.shutdown(socket.SHUT_RDWR)

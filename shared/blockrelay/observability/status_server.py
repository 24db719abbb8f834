"""An HTTP server for `/livez`, `/readyz` and `/metrics`, for services without a web framework.

A gateway uses it for its port that has only metrics.
"""

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

#: Connections open at once. A further one ends the oldest: a well-behaved client is answered within milliseconds. While
#: ended ones are still being answered, there may be twice as many.
MAX_CONNECTIONS = 16
#: The limits of a connection: its duration in seconds, and the size of its request in bytes.
DEADLINE_S, HEAD_BYTES = 5.0, 8192
_JSON = "application/json"
_PHRASES = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class StatusServer:
    """Serves health checks and metrics over HTTP from daemon threads, until `close`."""

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, gaps: Callable[[], list[str]] | None = None
    ) -> None:
        """Binds `host:port` and starts serving. Raises OSError if the address cannot be bound.

        `port` 0 picks a free port. `gaps` returns the reasons why the service is not ready, empty when it is; a thread
        of the server calls it for each `/readyz`, which answers 503 while there are reasons. Without `gaps` only
        `/metrics` is served.
        """
        self._server = _Server(host, port, registry, gaps)
        self.port: int = self._server.server_address[1]
        """The port in use."""
        self._thread = threading.Thread(target=self._server.serve_forever, name="status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening and waits until the accepting thread has ended."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingTCPServer):
    """A TCP server with a thread for each connection: MAX_CONNECTIONS (see there), each for DEADLINE_S at most."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, host: str, port: int, registry: CollectorRegistry, gaps: Callable[[], list[str]] | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.registry, self.gaps = registry, gaps
        #: Open connections, oldest first, and when each was accepted (seconds of the monotonic clock).
        self._open: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__((host, port), _Connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for a new connection, and ends the oldest if there are too many. Called by `socketserver`."""
        with self._lock:
            refused = len(self._open) >= 2 * MAX_CONNECTIONS  # connections that were ended are still being answered
            if not refused:
                if len(self._open) >= MAX_CONNECTIONS:
                    _end(next(iter(self._open)))
                self._open[request] = time.monotonic()
        if refused:
            super().shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Ends connections that have lasted too long. `socketserver` calls it twice a second."""
        with self._lock:
            for request, since in self._open.items():
                if time.monotonic() - since > DEADLINE_S:
                    _end(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs STATUS_FAILED, unless the error is a client that went away (OSError)."""
        if not isinstance(error := sys.exception(), OSError):
            get().error("STATUS_FAILED", error=repr(error))


class _Connection(socketserver.BaseRequestHandler):
    """Reads one request of a connection and answers it."""

    request: socket.socket

    def handle(self) -> None:
        """Reads the head of the request and answers it; closes without an answer if the head is cut off or too long."""
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
                body = {"status": "not ready" if reasons else "ready", "reasons": reasons}
                return 503 if reasons else 200, _JSON, json.dumps(body).encode()
            case _:
                return 404, _JSON, b'{"error": "not found"}'


_NO_METHOD = (405, _JSON, b'{"error": "GET and HEAD only"}')


def _end(request: socket.socket) -> None:
    """Ends a connection from another thread: reads and writes of its own thread fail at once, and that closes it."""
    with contextlib.suppress(OSError):  # the client has closed it already
        request.shutdown(socket.SHUT_RDWR)

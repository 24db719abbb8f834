"""`/livez`, `/readyz` and `/metrics` for services without a web framework (worker, scheduler)."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest


class StatusServer:
    """Serves from a daemon thread until `close`. `port` 0 picks a free one; `.port` is the one in use.

    `gaps` answers readiness: a list of reasons why the service is not ready, empty when it is.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry, gaps: Callable[[], list[str]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # the name is http.server's
                if self.path == "/metrics":
                    self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
                elif self.path == "/livez":
                    self._answer(200, "application/json", b'{"status": "ok"}')
                elif self.path == "/readyz":
                    reasons = gaps()
                    body = {"status": "not ready" if reasons else "ready", "reasons": reasons}
                    self._answer(503 if reasons else 200, "application/json", json.dumps(body).encode())
                else:
                    self._answer(404, "application/json", b'{"error": "not found"}')

            def _answer(self, status: int, content_type: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Scrapes are not events."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

"""Calls to our own services go straight to them, whatever proxies the environment names."""

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from blockrelay_launcher.bench.targets import check_gateway
from blockrelay_launcher.cli.worker_totals import read_totals
from blockrelay_launcher.client.resuming import is_on_this_machine, resuming_stream
from blockrelay_launcher.demo.answer import http_client
from tests.support.beside import serving
from tests.support.project import ROOT

#: Port 9 refuses; a socks proxy needs a package that is not installed.
PROXIES = {
    "HTTP_PROXY": "http://127.0.0.1:9",
    "http_proxy": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "ALL_PROXY": "socks5://127.0.0.1:9",
    "NO_PROXY": "",
    "no_proxy": "",
}


class Service(BaseHTTPRequestHandler):
    """A gateway and a worker, as far as it is asked here."""

    def do_GET(self) -> None:
        self._answer(b'{"data": [{"id": "m"}]}' if self.path == "/v1/models" else b"up 1\n")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._answer(b'id: q:1\ndata: {"n": 1}\n\ndata: [DONE]\n\n')

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    for name, value in PROXIES.items():
        monkeypatch.setenv(name, value)
    server = HTTPServer(("127.0.0.1", 0), Service)
    with serving(server):
        yield server.server_port


def test_commands_reach_gateways_and_workers(port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    check_gateway(url, "m")
    assert read_totals({"host": "127.0.0.1", "port": port}) is not None
    with http_client() as http:
        assert http.get(f"{url}/v1/models").status_code == 200
    assert [event.data for event in resuming_stream([url], "/v1/completions", {}, patience_s=5)] == [{"n": 1}]


def test_a_client_of_gateways_elsewhere_obeys_the_environment() -> None:
    assert all(map(is_on_this_machine, ("http://127.0.0.1:8000", "http://localhost", "http://[::1]:1/llm")))
    assert not any(map(is_on_this_machine, ("https://llm.example.org", "http://10.0.0.1:8000", "http://127.example")))


def test_health_checks_of_images_ask_their_own_service(port: int) -> None:
    checks = re.findall(
        r"^HEALTHCHECK .*\\\n +CMD \[\"python\", \"-c\", \"(.*)\"\]$",
        Path(ROOT / "deploy/Dockerfile").read_text(),
        re.M,
    )
    assert len(checks) == 5
    for check in {re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{port}", check) for check in checks}:
        done = subprocess.run(
            [sys.executable, "-c", check], env=os.environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (shlex.quote(check), done.stderr)


@pytest.mark.parametrize("folder", ["services", "shared", "bench"])
def test_every_call_says_whether_it_obeys_the_environment(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text()
        assert "urllib.request" not in text, f"{path}: httpx with trust_env=False"
        for node in ast.walk(ast.parse(text)) if "httpx" in text else ():
            if not isinstance(node, ast.Call):
                continue
            named = [ast.unparse(node.func), *map(ast.unparse, node.args[:1])]
            if any(re.fullmatch(r"httpx\.(get|post|put|delete|request|stream|(Async)?Client)", name) for name in named):
                assert "trust_env" in {word.arg for word in node.keywords}, f"{path}:{node.lineno}"

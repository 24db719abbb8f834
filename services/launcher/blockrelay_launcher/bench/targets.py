"""The two sides that `blockrelay bench` measures: a gateway over HTTP, and the executor in a process of its own."""

import asyncio
import contextlib
import json
import re
import signal
import ssl
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from blockrelay.errors import ServiceUnavailable, UsageError
from blockrelay.exit_codes import PREFIX, UNUSABLE
from blockrelay.host.child_command import module_command
from blockrelay_launcher.bench.figures import GREEDY, Drawing, Round
from blockrelay_launcher.supervisor.child_process import die_with_parent

#: Patterns that the client finds in the stream. It parses no JSON, because its CPU time comes from the workers' cores.
_TOKENS, _ERROR = re.compile(rb'"token_ids":\[(\d[^\]]*)\]'), re.compile(rb'^(?:event: error|data: \{"error")', re.M)
#: Seconds that a round may take.
PATIENCE_S = 600.0


class GatewaySide:
    """The side that streams completions of `model` from the gateway at the base URL `url`. Close it after use.

    Each request has a connection of its own.
    """

    def __init__(self, url: str, model: str) -> None:
        self._model = model
        self._runner = asyncio.Runner()
        parts = urlsplit(url)
        self._host, self._tls = parts.hostname or "", parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._head = (
            f"POST {parts.path.rstrip('/')}/v1/completions HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n"
            "content-type: application/json\r\ncontent-length: "
        )

    def round(
        self, prompts: Sequence[Sequence[int]], new: int, *, drawing: Drawing = GREEDY, use_cache: bool = True
    ) -> Round:
        """Sends all prompts (token ids) at once and waits until each has `new` tokens.

        `use_cache` False: the requests keep no KV between tokens. Raises ServiceUnavailable if one is not answered to
        its end within PATIENCE_S.
        """
        fields = {**asdict(drawing), **({} if use_cache else {"use_cache": False})}
        bodies = [self._body(prompt, new, {**fields, "seed": seed}) for seed, prompt in enumerate(prompts)]
        return self._runner.run(self._round(bodies, new))

    def close(self) -> None:
        """Closes the event loop."""
        self._runner.close()

    def _body(self, prompt: Sequence[int], new: int, more: Mapping[str, float]) -> bytes:
        fields = {
            "model": self._model, "prompt": list(prompt), "max_tokens": new, "ignore_eos": True, "stream": True,
            "return_token_ids": True, **more,
        }  # fmt: skip
        return json.dumps(fields).encode()

    async def _round(self, bodies: Sequence[bytes], new: int) -> Round:
        cpu, sent = time.process_time(), time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE_S):
                tokens = await asyncio.gather(*(self._stream(body) for body in bodies))
        except (OSError, TimeoutError) as error:
            raise ServiceUnavailable(f"the gateway did not answer to the end ({error!r})") from error
        spent = time.process_time() - cpu
        for came in tokens:
            if len(came) != new:
                raise ServiceUnavailable(f"an answer ended after {len(came)} of {new} tokens")
        return Round(sent, tokens, client_cpu_s=spent)

    async def _stream(self, body: bytes) -> list[float]:
        """Streams one completion and returns the arrival time of each token."""
        loop, answer = asyncio.get_running_loop(), _Answer()
        transport, _ = await loop.create_connection(
            lambda: answer, self._host, self._port, ssl=ssl.create_default_context() if self._tls else None
        )
        transport.write(f"{self._head}{len(body)}\r\n\r\n".encode() + body)
        try:
            await answer.ended
        finally:
            transport.abort()
        return answer.came


class _Answer(asyncio.Protocol):
    """The reader of one streamed answer. It does as little as possible, because it shares the workers' cores.

    Of HTTP it parses only the status. Every chunk of the gateway holds whole events, so that no event is cut.
    """

    def __init__(self) -> None:
        self.came: list[float] = []  # arrival time of each token
        self.ended = asyncio.get_running_loop().create_future()
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if not self.came and not self._rest and not data.startswith(b"HTTP/1.1 200 "):
            return self._fail(f"the gateway answered {data[:400]!r}")
        events, _, self._rest = (self._rest + data).rpartition(b"\n\n")
        for match in _TOKENS.finditer(events):
            self.came.extend([now] * (1 + match.group(1).count(b",")))
        if _ERROR.search(events):
            return self._fail(f"an answer ended with an error: {events[:300]!r}")
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def _fail(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(ServiceUnavailable(why))


def check_gateway(url: str, model: str) -> None:
    """Raises UsageError unless a gateway at `url`, which has no slash at its end, serves `model`.

    It uses no proxy, as the rounds use none: a proxy's time would be measured too.
    """
    try:
        answer = httpx.get(f"{url}/v1/models", timeout=10, trust_env=False, verify=ssl.create_default_context())
        served = [entry["id"] for entry in answer.raise_for_status().json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--url {url}: no gateway answers there ({error})") from error
    if model not in served:
        raise UsageError(f"--url {url} serves {', '.join(served)}, and --model is {model}")


class InProcessSide:
    """The side that runs the executor's loop in one process, without services."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        """Waits until `process` has loaded the model. Raises ServiceUnavailable if it ends before.

        `process` runs `blockrelay_worker.offline.bench`, with text pipes as stdin and stdout.
        """
        self._process = process
        if self._read() != "ready":
            raise ServiceUnavailable(f"the measured process ended with code {process.wait()} before it was ready")

    def round(self, prompts: Sequence[Sequence[int]], new: int, *, drawing: Drawing = GREEDY) -> Round:
        """Runs all prompts (token ids) at once, each until it has `new` tokens.

        Raises ServiceUnavailable if the process ends, as it does if its KV pages do not hold the whole round.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new": new, **asdict(drawing)}) + "\n")
        self._process.stdin.flush()
        answer: Any = json.loads(self._read())
        return Round(answer["sent"], answer["tokens"])

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ServiceUnavailable(f"the measured process ended with code {self._process.wait()}")
        return line.rstrip("\n")


def roofline(
    model: Path, *, threads: int, max_rows: int, requests: Sequence[int], prompts: Sequence[int]
) -> dict[str, Any]:
    """Runs `blockrelay_worker.offline.roofline` in a process of its own and returns its report.

    Raises UsageError where there is no roofline, ServiceUnavailable if the process fails.
    """
    options = ["--threads", str(threads), "--max-rows", str(max_rows)]
    options += [text for count in requests for text in ("--requests", str(count))]
    options += [text for length in prompts for text in ("--prompt", str(length))]
    done = subprocess.run(
        module_command("blockrelay_worker.offline.roofline", "--model", model, *options),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=die_with_parent(signal.SIGKILL),
    )
    if done.returncode == UNUSABLE:
        raise UsageError(f"--roofline: {done.stderr.strip().removeprefix(PREFIX)}")
    if done.returncode:
        raise ServiceUnavailable(f"the roofline's process ended with code {done.returncode}: {done.stderr[-400:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@contextlib.contextmanager
def in_process(model: Path, *, threads: int, max_rows: int, pages: int) -> Iterator[InProcessSide]:
    """Runs the executor in a process of its own, yields its side once the block folder `model` is loaded, and ends it.

    `threads` and `max_rows` (tokens of a batch) are those of a worker; `pages`: KV pages for the largest round. Raises
    ServiceUnavailable if the process ends before it is ready.
    """
    options = ["--threads", str(threads), "--max-rows", str(max_rows), "--pages", str(pages)]
    with subprocess.Popen(
        module_command("blockrelay_worker.offline.bench", "--model", model, *options),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent(signal.SIGKILL),
    ) as process:
        try:
            yield InProcessSide(process)
        finally:
            process.kill()

"""Counts requests that a roll of gateways breaks: `python -m bench.scenarios.gateway_roll --model DIR --streams 200`.

It starts a system with two gateways behind a balancer, which sends new connections to the gateways that are ready, as
a Service of Kubernetes does. The `openai` client streams through both, without keys and without retries, and sends
short requests all the time. When an eighth of the streams have begun, each gateway is replaced as a Deployment does it:
the new one is ready before the old one gets SIGTERM, and the next gateway is replaced without waiting for its end.
Every answer is compared with that of an undisturbed system.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAIError

from bench.scenarios.gateway_kills import answers
from bench.scenarios.recovery import RecoveringSystem, running, wait_until
from blockrelay.settings import environment_for
from blockrelay.up_file import read_running
from blockrelay_launcher.supervisor.ports import kept_ports

#: The number of different requests among the streams, and the tokens of a short request.
BODIES, SHORT = 8, 4
#: Seconds between two checks by the balancer, and short requests in flight at once.
LOOK_S, SHORT_AT_ONCE = 0.5, 4
#: Seconds that a gateway listens after SIGTERM, as in deploy/k8s.
LINGER_S = 10.0


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """A gateway: its address and process."""

    url: str
    process: "subprocess.Popen[bytes]"


@dataclass
class Report:
    """The outcome of a roll."""

    streams: int = 0
    short: int = 0
    """Short requests."""
    broken: list[str] = field(default_factory=list[str])
    """A line for each broken request."""
    differing: int = 0
    """Answers with other tokens than an undisturbed system gives."""
    refused: int = 0
    """Connections for a gateway that no longer listened, or while none was ready."""
    stream_s: list[float] = field(default_factory=list[float])
    """Seconds of each stream."""
    gone_s: list[float] = field(default_factory=list[float])
    """Seconds of each gateway from SIGTERM to its end."""
    under_way: list[int] = field(default_factory=list[int])
    """Streams that had not ended at each SIGTERM."""


class Balancer:
    """A TCP proxy that sends new connections in turn to gateways that are ready."""

    def __init__(self, gateways: Sequence[RunningGateway], look_s: float) -> None:
        self.gateways, self._look_s = list(gateways), look_s
        self.ready: list[str] = []
        self._looked = asyncio.Event()
        self._turn = self.refused = 0
        self._passing: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Runs the proxy, and yields its URL."""
        looking = asyncio.create_task(self._look())
        server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in (looking, *self._passing):
                task.cancel()
            await asyncio.gather(looking, *self._passing, return_exceptions=True)

    async def shows(self, gateway: RunningGateway) -> None:
        """Waits until the balancer sends requests to this gateway."""
        while gateway.url not in self.ready:
            await self._looked.wait()

    async def _look(self) -> None:
        """Asks all gateways again and again which are ready."""
        async with httpx.AsyncClient(trust_env=False, timeout=5) as http:
            while True:
                self.ready = [
                    one.url for one in self.gateways if await _is_ready(http, one.url, before=one.url in self.ready)
                ]
                self._looked.set()
                self._looked.clear()
                await asyncio.sleep(self._look_s)

    def _accepted(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._pass_on(client, to_client))
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def _pass_on(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """Connects a client to the next ready gateway, and copies bytes both ways until one side ends."""
        self._turn += 1
        with contextlib.closing(to_client):
            if not self.ready:
                self.refused += 1
                return
            url = httpx.URL(self.ready[self._turn % len(self.ready)])
            try:
                gateway, to_gateway = await asyncio.open_connection(url.host, url.port)
            except OSError:
                self.refused += 1
                return
            with contextlib.closing(to_gateway):
                both = [asyncio.create_task(_copy(client, to_gateway)), asyncio.create_task(_copy(gateway, to_client))]
                try:
                    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for one in both:
                        one.cancel()
                    await asyncio.gather(*both, return_exceptions=True)


async def _is_ready(http: httpx.AsyncClient, url: str, *, before: bool) -> bool:
    """Asks a gateway whether it is ready. A late answer leaves it as it was `before`, as Kubernetes does, whose probes
    must fail more than once."""
    try:
        return (await http.get(f"{url}/readyz?for=accepting")).status_code == 200
    except httpx.TimeoutException:
        return before
    except httpx.TransportError:
        return False


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while part := await reader.read(1 << 16):
        writer.write(part)
        await writer.drain()


def body_of(model: str, index: int, tokens: int) -> dict[str, Any]:
    """Returns a request for `tokens` tokens, with parameters for the `openai` client.

    It samples, so that only its seed, `index`, gives its text.
    """
    prompt = [10 + (index * 31 + at * 7) % 200 for at in range(16)]
    extra = {"ignore_eos": True, "return_token_ids": True, "timeout": 3600}
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.8,
        "seed": index,
        "extra_body": extra,
    }


async def answers_of(url: str, model: str, tokens: int) -> list[list[int]]:
    """Returns the token ids of the answers of `tokens` tokens to all different requests, from an undisturbed system."""
    async with client_of(url) as api:
        calls = [api.completions.create(**body_of(model, index, tokens)) for index in range(BODIES)]
        results = await asyncio.gather(*calls)
        return [result.choices[0].model_extra["token_ids"] for result in results]  # pyright: ignore


def client_of(url: str) -> AsyncOpenAI:
    """Returns a client of one address that does not retry, so that every broken request shows."""
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=3600)


async def roll(
    gateways: Sequence[RunningGateway],
    another: Callable[[], RunningGateway],
    *,
    streams: int,
    tokens: int,
    look_s: float = LOOK_S,
) -> Report:
    """Replaces every gateway under `streams` streams of `tokens` tokens each, and returns the outcome.

    `another` starts a gateway. The caller ends the gateways that are left.
    """
    report, balancer, over = Report(), Balancer(gateways, look_s), asyncio.Event()
    async with client_of(gateways[0].url) as api:
        model = (await api.models.list()).data[0].id
    long, short = [await answers_of(gateways[0].url, model, length) for length in (tokens, SHORT)]
    replacements = [
        await asyncio.to_thread(another) for _ in gateways
    ]  # before the streams, because a start beside them takes long
    begun = asyncio.Semaphore(0)
    sigterms: list[float] = []  # monotonic seconds

    def how(error: Exception) -> str:
        since = f"{time.monotonic() - sigterms[-1]:.1f} s after a SIGTERM" if sigterms else "before the roll"
        return f"{error!r} by {error.__cause__!r}, {since}"

    async def stream(api: AsyncOpenAI, index: int) -> None:
        report.streams += 1
        received: list[int] = []
        started = time.monotonic()
        try:
            async for chunk in await api.completions.create(stream=True, **body_of(model, index % BODIES, tokens)):
                begun.release() if not received else None
                received += chunk.choices[0].model_extra["token_ids"]  # pyright: ignore
        except Exception as error:  # noqa: BLE001  # any error, of whichever library, breaks the stream
            begun.release()
            report.broken.append(f"a stream after {len(received)} tokens: {how(error)}")
            return
        report.stream_s.append(time.monotonic() - started)
        report.differing += received != long[index % BODIES]

    async def ask_on(api: AsyncOpenAI) -> None:
        while not over.is_set():
            report.short += 1
            try:
                answer = await api.completions.create(**body_of(model, report.short % BODIES, SHORT))
                report.differing += answer.choices[0].model_extra["token_ids"] not in short  # pyright: ignore
            except OpenAIError as error:
                report.broken.append(f"a short request: {how(error)}")

    async def leave(gateway: RunningGateway) -> None:
        gateway.process.send_signal(signal.SIGTERM)
        sigterms.append(since := time.monotonic())
        await asyncio.to_thread(gateway.process.wait)
        report.gone_s.append(time.monotonic() - since)
        balancer.gateways.remove(gateway)

    async with balancer.running() as url, client_of(url) as api, asyncio.TaskGroup() as tasks:
        for gateway in gateways:
            await balancer.shows(gateway)
        streaming = [tasks.create_task(stream(api, index)) for index in range(streams)]
        for _ in range(SHORT_AT_ONCE):
            tasks.create_task(ask_on(api))
        for _ in range(streams // 8):  # when the last one begins, the first has ended
            await begun.acquire()
        leaving: list[asyncio.Task[None]] = []
        for gateway, new in zip(gateways, replacements, strict=True):
            balancer.gateways.append(new)
            await balancer.shows(new)
            report.under_way.append(sum(not one.done() for one in streaming))
            leaving.append(tasks.create_task(leave(gateway)))
        await asyncio.gather(*leaving, *streaming)
        over.set()
    report.refused = balancer.refused
    return report


def main(arguments: list[str] | None = None) -> int:
    """Runs a roll, prints the figures, and returns the exit code: 1 if a request broke or an answer differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="block folder")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each stream")
    parser.add_argument("--drain", type=float, default=60.0, help="seconds that a gateway lets streams go on")
    parser.add_argument("--linger", type=float, default=LINGER_S, help="seconds that it listens after SIGTERM")
    parser.add_argument("--look", type=float, default=LOOK_S, help="seconds between two checks by the balancer")
    parser.add_argument("--json", action="store_true")
    chosen, options = parser.parse_known_args(arguments)
    with running(chosen.model, 1, options) as system, contextlib.ExitStack() as ended:

        def another() -> RunningGateway:
            gateway = _start(system, chosen.model, drain_s=chosen.drain, linger_s=chosen.linger)
            ended.callback(_end, gateway)
            return gateway

        sizes = {"streams": chosen.streams, "tokens": chosen.tokens}
        report = asyncio.run(roll([another(), another()], another, **sizes, look_s=chosen.look))
    figures = {
        "streams": report.streams,
        "stream_p50_s": round(median(report.stream_s or [0.0]), 1),
        "stream_max_s": round(max(report.stream_s or [0.0]), 1),
        "short": report.short,
        "broken": len(report.broken),
        "differing": report.differing,
        "refused": report.refused,
        "under_way": report.under_way,
        "gateways_gone_s": [round(each, 1) for each in report.gone_s],
    }
    print(json.dumps(figures) if chosen.json else "  ".join(f"{name} {value}" for name, value in figures.items()))
    for line in sorted(set(report.broken))[:10]:
        print(line, file=sys.stderr)
    return 1 if report.broken or report.differing else 0


def _start(system: RecoveringSystem, model: Path, *, drain_s: float, linger_s: float) -> RunningGateway:
    """Starts a gateway of the system on a free port, and returns it when it is ready."""
    system_file = read_running(system.data)
    with kept_ports("127.0.0.1", 0, 1) as (port,):
        env = environment_for(
            model=model,
            redis_url=system_file.redis_url,
            payload_redis_url=system_file.payload_redis_url,
            cell=system_file.cell,
            port=port,
            gateway_drain_s=drain_s,
            gateway_linger_s=linger_s,
        )
        with (system.data / f"gateway-{port}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "blockrelay_gateway"], env={**os.environ, **env}, stdout=log, stderr=log
            )
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(url), "a gateway")
    return RunningGateway(url, process)


def _end(gateway: RunningGateway) -> None:
    gateway.process.send_signal(signal.SIGINT)
    gateway.process.wait()


if __name__ == "__main__":
    sys.exit(main())

"""Sends more requests than a system can serve (`make overload`): `python -m bench.scenarios.overload --model DIR`.

It starts a system (`blockrelay up`). First as many clients as slots send their next request when the last is answered:
that rate is the capacity. Then requests arrive at `--factor` times that rate, each with a deadline and without retries.
All accepted requests should be answered in time, and as much of the capacity as possible should go into them. Prompts
share nothing, and speculation is off. Figures are never asserted.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_launcher.background import started_up
from blockrelay_launcher.drill.system import children_of, command_line

CLIENTS = 64
#: Seconds at the beginning of the closed loop that do not count, because the first requests all begin together.
WARM_UP_S = 3.0
#: Seconds without use after which a connection is closed, well before the gateway closes it.
IDLE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSize:
    """The size of every request."""

    prompt: int
    """Tokens of the prompt."""
    new: int
    """Tokens of the answer."""
    vocab: int
    """Number of token ids of the model."""

    def body(self, chance: random.Random, timeout_s: float | None) -> bytes:
        """Returns the body of a request with a random prompt, and a deadline unless `timeout_s` is None."""
        prompt = [chance.randrange(3, self.vocab) for _ in range(self.prompt)]
        body = {"prompt": prompt, "max_tokens": self.new, "temperature": 0, "ignore_eos": True}
        return json.dumps(body if timeout_s is None else {**body, "timeout": timeout_s}).encode()


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The number of requests by their outcome."""

    sent: int = 0
    in_time: int = 0
    late: int = 0
    """Answered with 200 after the deadline."""
    expired: int = 0
    """Answered with 504."""
    refused: Counter[str] = field(default_factory=Counter[str])
    """Answered with 429 or 503, by status."""
    failed: Counter[str] = field(default_factory=Counter[str])
    """Other failures, by status or exception."""
    without_retry_after: int = 0
    """Refusals without the header Retry-After."""
    seconds: list[float] = field(default_factory=list[float])
    """Seconds of each request that was answered with 200."""
    ended_at: list[float] = field(default_factory=list[float])
    """The monotonic time of each of these answers."""

    @property
    def accepted(self) -> int:
        """All requests that were not refused."""
        return self.in_time + self.late + self.expired + self.failed.total()


class Client:
    """A minimal HTTP client, since it shares the cores with what it measures. It keeps connections open."""

    def __init__(self, url: str) -> None:
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)
        # Monotonic time of the last use and connection, the last used last.
        self._idle: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, body: bytes) -> tuple[int, bytes]:
        """Sends a completion, and returns the status and head of its answer once all of it is there.

        Raises OSError, EOFError or ValueError for a broken connection.
        """
        while self._idle and self._idle[0][0] < time.monotonic() - IDLE_S:
            self._idle.pop(0)[2].close()
        if self._idle:
            _, reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.partition(b"content-length:")[2].partition(b"\r\n")[0]))
        self._idle.append((time.monotonic(), reader, writer))
        return int(head[9:12]), head


async def ask(client: Client, body: bytes, deadline_s: float | None, outcome: Outcome) -> None:
    """Sends a request, waits for its answer, and counts it in `outcome`.

    An answer after more than `deadline_s` counts as late; None: none is late.
    """
    outcome.sent += 1
    began = time.monotonic()
    try:
        status, head = await client.post(body)
    except (OSError, EOFError, ValueError) as error:
        outcome.failed[type(error).__name__] += 1
        return
    took = time.monotonic() - began
    if status in (429, 503):
        outcome.refused[f"{status}"] += 1
        outcome.without_retry_after += b"retry-after:" not in head
    elif status == 504:
        outcome.expired += 1
    elif status != 200:
        outcome.failed[f"{status}"] += 1
    else:
        outcome.seconds.append(took)
        outcome.ended_at.append(time.monotonic())
        if deadline_s is None or took <= deadline_s:
            outcome.in_time += 1
        else:
            outcome.late += 1


async def capacity(client: Client, load: RequestSize, seconds: float, chance: random.Random) -> float:
    """Measures the requests per second of a closed loop of CLIENTS clients, for `seconds` after a warm-up."""
    outcome, until = Outcome(), time.monotonic() + WARM_UP_S + seconds

    async def loop() -> None:
        while time.monotonic() < until:
            await ask(client, load.body(chance, None), None, outcome)

    await asyncio.gather(*(loop() for _ in range(CLIENTS)))
    # The rate between the first and the last answer, because answers come in groups.
    first = until - seconds
    ends = sorted(at for at in outcome.ended_at if at >= first)
    return (len(ends) - 1) / (ends[-1] - ends[0])


async def flood(
    client: Client, load: RequestSize, rate: float, seconds: float, deadline_s: float, chance: random.Random
) -> Outcome:
    """Sends requests at random times, `rate` per second on average, for `seconds`; returns when all are answered."""
    outcome = Outcome()
    # Made before, because the client shares the cores with what it measures.
    bodies = [load.body(chance, deadline_s) for _ in range(round(rate * seconds * 1.1))]
    at = began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        while at < began + seconds and bodies:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            tasks.create_task(ask(client, bodies.pop(), deadline_s, outcome))
            at += chance.expovariate(rate)
    return outcome


@dataclass(frozen=True, slots=True)
class OverloadedSystem:
    """A running `blockrelay up`: its process id and the address of its gateway."""

    pid: int
    url: str

    def memory(self) -> dict[str, int]:
        """Returns the resident MiB of all processes of each kind."""
        mib: Counter[str] = Counter()
        for pid, kind in self._processes():
            status = Path(f"/proc/{pid}/status").read_text()
            mib[kind] += next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")) >> 10
        return dict(mib)

    def cpu_s(self) -> dict[str, float]:
        """Returns the seconds of processor time that all processes of each kind have used, this one as `client`."""
        used: dict[str, float] = {"client": time.process_time()}
        for pid, kind in self._processes():
            user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            used[kind] = used.get(kind, 0.0) + (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        return used

    def _processes(self) -> Iterator[tuple[int, str]]:
        kinds = ("blockrelay_gateway", "blockrelay_scheduler", "blockrelay_worker", "control", "payload")
        for pid in (self.pid, *children_of(self.pid)):
            command = command_line(pid)
            yield pid, next((kind.removeprefix("blockrelay_") for kind in kinds if kind in command), "launcher")


@contextmanager
def running(model: Path) -> Iterator[OverloadedSystem]:
    """Runs `blockrelay up` with a data folder of its own; yields when it is ready.

    Raises ServiceUnavailable if it ends before.
    """
    with tempfile.TemporaryDirectory(prefix="br-overload-") as folder:
        options = ["--model", str(model), "--port", "0", "--no-speculation", "--data", folder]
        with started_up(*options, apart=False) as up:
            yield OverloadedSystem(up.process.pid, up.urls[0])


async def measure(system: OverloadedSystem, load: RequestSize, options: argparse.Namespace) -> dict[str, object]:
    """Measures the capacity, then the overload, and returns the figures."""
    chance, deadline = random.Random(1), float(options.deadline)
    peak: Counter[str] = Counter()

    async def watch() -> None:
        while True:
            peak.update({name: max(0, mib - peak[name]) for name, mib in system.memory().items()})
            await asyncio.sleep(1)

    client = Client(system.url)
    at_first = system.cpu_s()
    full = await capacity(client, load, options.capacity_seconds, chance)
    at_capacity = system.cpu_s()
    print(f"capacity: {full:.2f} requests/s", file=sys.stderr, flush=True)
    before, watching = system.memory(), asyncio.create_task(watch())
    began = time.monotonic()
    at_flood = system.cpu_s()
    flooding = asyncio.create_task(flood(client, load, options.factor * full, options.seconds, deadline, chance))
    await asyncio.sleep(options.seconds)
    at_end = system.cpu_s()
    outcome = await flooding
    print(f"all answered {time.monotonic() - began:.1f} s after the first", file=sys.stderr, flush=True)
    watching.cancel()
    metrics = (await asyncio.to_thread(httpx.get, f"{system.url}/metrics", trust_env=False)).text
    good = sum(1 for at, took in zip(outcome.ended_at, outcome.seconds, strict=True)
               if took <= deadline and at <= began + options.seconds)  # fmt: skip
    latency = sorted(outcome.seconds) or [0.0]
    return {
        "capacity_tokens_per_s": round(full * load.new, 1),
        "sent": outcome.sent,
        "sent_per_s": round(outcome.sent / options.seconds, 1),
        "accepted": outcome.accepted,
        "in_time": outcome.in_time,
        "in_time_share": round(outcome.in_time / max(1, outcome.accepted), 4),
        "late": outcome.late,
        "expired": outcome.expired,
        "failed": dict(outcome.failed),
        "refused": dict(outcome.refused),
        "refused_by": _by_limit(metrics),
        "refused_without_retry_after": outcome.without_retry_after,
        "goodput_tokens_per_s": round(good * load.new / options.seconds, 1),
        "goodput_share": round(good / options.seconds / full, 3),
        "latency_s": {"p50": round(latency[len(latency) // 2], 2), "max": round(latency[-1], 2)},
        "cores_at_capacity": _per_s(at_first, at_capacity, options.capacity_seconds + WARM_UP_S),
        "cores_in_flood": _per_s(at_flood, at_end, options.seconds),
        "mib_before": before,
        "mib_after": system.memory(),
        "mib_peak": dict(peak),
    }


def _per_s(first: Mapping[str, float], last: Mapping[str, float], seconds: float) -> dict[str, float]:
    """The cores that each kind of process used between two readings of `cpu_s`, `seconds` apart."""
    return {kind: round((used - first.get(kind, 0.0)) / seconds, 3) for kind, used in last.items()}


def _by_limit(metrics: str) -> dict[str, int]:
    lines = [line for line in metrics.splitlines() if line.startswith("blockrelay_admission_limited_total")]
    counts = ((line.partition('limit="')[2].partition('"')[0], int(float(line.split()[-1]))) for line in lines)
    return {limit: count for limit, count in counts if count}


def main() -> int:
    """Measures, prints the figures as JSON, and returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL, help="block folder")
    parser.add_argument("--factor", type=float, default=10, help="arrival rate as a multiple of the capacity")
    parser.add_argument("--seconds", type=float, default=120, help="seconds for which requests arrive")
    parser.add_argument("--deadline", type=float, default=30, help="seconds that a request may take")
    parser.add_argument("--capacity-seconds", type=float, default=15, help="seconds of the measurement of capacity")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens of each request")
    options = parser.parse_args()
    vocab = open_block_folder(options.model, blocks=()).model.vocab_size
    load = RequestSize(prompt=options.prompt, new=options.new, vocab=vocab)
    with running(options.model) as system:
        figures = asyncio.run(measure(system, load, options))
    print(json.dumps({"model": options.model.name, **asdict(load), **figures}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures single costs of this host: syncs of a disk, turns on a core, speeds of cores together, reads of logs."""

import asyncio
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from bench.simulate.measured.driving import wire_bytes
from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import AsyncOneConnection, connect, connect_async
from blockrelay_launcher.background import running_redis

Result = TypeVar("Result")
#: Bytes that Redis appends for a commit of about ten tokens, and seconds between two syncs of a busy Redis.
SYNCED_BYTES, BETWEEN_SYNCS_S = 4000, 0.002


def sync_cost(folder: Path | None = None, times: int = 400) -> tuple[float, float]:
    """Returns the seconds of CPU, and of waiting, until a file that has grown is on disk.

    The file is in `folder` (None: the folder of temporary files) and grows `times` times.
    Both are means and not medians: a few waits are long, and everything that waits for Redis shares them.
    """
    cpu_s = wait_s = 0.0
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(times):
            time.sleep(BETWEEN_SYNCS_S)
            cpu, wall = time.thread_time(), time.perf_counter()
            os.write(file.fileno(), bytes(SYNCED_BYTES))
            os.fdatasync(file.fileno())
            spent = time.thread_time() - cpu
            cpu_s, wait_s = cpu_s + spent, wait_s + time.perf_counter() - wall - spent
    return cpu_s / times, max(0.0, wait_s / times)


@contextmanager
def _computing(count: int) -> Iterator[None]:
    """Keeps `count` processes computing all the time."""
    context = multiprocessing.get_context("fork")
    spinning = [context.Process(target=_spin_for_ever, daemon=True) for _ in range(count)]
    for process in spinning:
        process.start()
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.join()


def beside(most: int, measure: Callable[[], Result]) -> tuple[Result, ...]:
    """Returns the results of `measure` while 0, 1, ... `most` other processes compute all the time."""
    results: list[Result] = []
    for count in range(most + 1):
        with _computing(count):
            results.append(measure())
    return tuple(results)


def _spin_for_ever() -> None:
    while True:
        sum(range(1000))


def turn_s(cores: int, seconds: float = 1.0) -> float:
    """Returns the seconds that a process keeps a core while others wait, with twice as many processes as cores."""
    results = _spinning(2 * cores, seconds)
    return sum(one.cpu_s for one in results) / sum(one.turns for one in results)


def speeds(most: int, seconds: float = 1.0) -> tuple[float, ...]:
    """Returns the speed of 1, 2, ... `most` busy processes together, relative to that of one.

    It counts the work that each does in a second of its own CPU. Other programs on the host do not change it, but cores
    that are two threads of one do.
    """
    pace = [_pace(count, seconds) for count in range(1, most + 1)]
    return tuple(count * min(1.0, rate / pace[0]) for count, rate in enumerate(pace, 1))


def _pace(count: int, seconds: float) -> float:
    """Returns the mean work in a second of CPU of `count` processes at once."""
    return sum(one.done / one.cpu_s for one in _spinning(count, seconds)) / count


@dataclass(frozen=True, slots=True)
class _Spun:
    """The result of a process that computed all the time."""

    done: int
    """Units of work."""
    cpu_s: float
    """Seconds of CPU."""
    turns: int
    """How often it got a core."""


def _spinning(count: int, seconds: float) -> list[_Spun]:
    """Runs `count` busy processes at once for `seconds`, and returns their results."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    processes = [context.Process(target=_spin, args=(write, seconds), daemon=True) for _, write in pipes]
    for process in processes:
        process.start()
    results = [read.recv() for read, _ in pipes]
    for process in processes:
        process.join()
    return results


def _spin(write: "Connection[_Spun, _Spun]", seconds: float) -> None:
    """Computes for some seconds, and sends the result through the pipe."""
    done, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))
        done += 1
    nanoseconds, _, turns = map(int, Path("/proc/self/schedstat").read_text().split())
    write.send(_Spun(done, nanoseconds / 1e9, turns))


@dataclass(frozen=True, slots=True)
class ReadCosts:
    """The cost of each further log in a read: seconds of CPU of Redis and of the gateway, and bytes on the wire."""

    redis: float
    gateway: float
    wire_bytes: float


def read_stream_cost(many: int = 512, times: int = 200) -> ReadCosts:
    """Measures the cost of a log in a read, from reads that block on one log and on `many`, each ended by an entry.

    It does `times` reads of each kind.
    """
    few, lots = (asyncio.run(_reads(count, times)) for count in (1, many))
    each = (many - 1) * times
    redis_s, gateway_s, wire_bytes = (max(0.0, more - less) / each for more, less in zip(lots, few, strict=True))
    return ReadCosts(redis_s, gateway_s, wire_bytes)


async def _reads(count: int, times: int) -> tuple[float, float, float]:
    """Returns seconds of CPU of Redis and of the reader, and bytes on the wire, of `times` reads of `count` logs."""
    with running_redis(durable=False) as url:
        control, client = connect(url), connect_async(url)
        pid = int(control.info("server")["process_id"])  # pyright: ignore[reportUnknownArgumentType, reportIndexIssue]
        reading = AsyncOneConnection(client)
        names = [Keys("c0").log(f"req-{number:024d}").encode() for number in range(count)]
        before, bytes_before, cpu = _redis_cpu(pid), wire_bytes(control), 0.0
        for number in range(1, times + 1):
            began = time.process_time()
            positions = (f"{number - 1}-0" for _ in names)
            task = asyncio.ensure_future(
                reading.ask("XREAD", "COUNT", 256, "BLOCK", 1000, "STREAMS", *names, *positions)
            )
            await asyncio.sleep(0)
            cpu += time.process_time() - began
            control.xadd(names[0], {"token": 1}, id=f"{number}-0")
            began = time.process_time()
            await task
            cpu += time.process_time() - began
        spent, came = _redis_cpu(pid) - before, wire_bytes(control) - bytes_before
        await client.aclose()
        return spent, cpu, came


def _redis_cpu(pid: int) -> float:
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9

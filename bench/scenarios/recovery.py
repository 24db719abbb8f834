"""Measures how long streams stall after a failure: `python -m bench.scenarios.recovery --model DIR`.

It starts a system (`blockrelay up` with two workers of the whole model), and makes one accident after the other happen,
each to new requests of `--context` tokens. `make bench-recovery` runs it. The accidents are:

    worker  kill -9 of the worker that has the request; the launcher sees it
    host    the same worker is frozen, so that nothing reports its death, as when a host vanishes
    redis   kill -9 of the control Redis under four streams; the slowest of them counts
    device  kill -9 of the process of a device that has all stages, in a second system with CPU workers beside it
            (`--accidents device`; the device is that of `--device`, by default ONNX Runtime's CPU provider)

A stall is the longest time between two tokens from the accident on. Figures are never asserted.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, cast

import httpx

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.errors import RedisTrouble
from blockrelay.protocol.encoding.request_ids import own_id
from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import connect
from blockrelay.redis.registry import read_lost_devices, read_workers, retry_lost_device
from blockrelay.up_file import read_running
from blockrelay_launcher.drill.system import children_of, command_line
from blockrelay_launcher.percentile import percentile

ACCIDENTS = ("worker", "host", "redis")
#: Tokens of a stream before the accident and after it.
BEFORE, AFTER = 40, 24
#: Streams at once in the accident `redis`.
STREAMS = 4
#: Least seconds between two accidents: faster deaths would make the launcher give a process up.
APART_S = 2.5


@dataclass
class Stream:
    """A streamed completion, which a thread of its own reads."""

    url: str
    prompt: Sequence[int]
    tokens: int
    """Tokens to generate."""
    patience_s: float = 60.0
    """Most seconds to wait for a token."""
    request_id: str = ""
    came: list[float] = field(default_factory=list[float])
    """The monotonic time at which each token came."""
    received: list[int] = field(default_factory=list[int])
    """The tokens that came."""
    cached: int = 0
    """Tokens of the prompt that were prefix hits."""
    trouble: str = ""
    """The error that ended it; empty: none."""
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        """Sends the request and reads its stream, in the thread."""
        body = {
            "prompt": list(self.prompt), "max_tokens": self.tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        try:
            stream = httpx.stream(
                "POST", f"{self.url}/v1/completions", json=body, timeout=self.patience_s, trust_env=False
            )
            with stream as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            self.trouble = repr(error)

    def _take(self, chunk: dict[str, Any]) -> None:
        """Notes the tokens, the request id and the usage in one event."""
        now = time.monotonic()
        if "error" in chunk:
            self.trouble = str(chunk["error"])
            return
        self.request_id = own_id(str(chunk["id"]))
        for choice in chunk["choices"]:
            self.received += choice.get("token_ids") or []
        self.came += [now] * (len(self.received) - len(self.came))
        if usage := chunk.get("usage"):
            self.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    def wait_for(self, tokens: int) -> None:
        """Waits until this many tokens came. Raises TimeoutError, or RuntimeError for a stream that failed."""
        wait_until(lambda: len(self.came) >= tokens or self.trouble, f"{tokens} tokens", timeout_s=self.patience_s)
        if self.trouble:
            raise RuntimeError(self.trouble)

    def stall_s(self, at: float) -> float:
        """Waits for the end of the stream; returns the longest pause that ended after `at` (monotonic seconds)."""
        self._thread.join(self.patience_s)
        return max(after - before for before, after in pairwise(self.came) if after > at)


@dataclass(frozen=True)
class RecoveringSystem:
    """A running `blockrelay up`."""

    pid: int
    url: str
    """The address of its gateway."""
    data: Path
    """Its data folder."""
    keys: Keys
    model: str
    """The model's key in Redis."""
    workers: int
    """The number of its workers."""
    patience_s: float = 60.0
    """Most seconds of what it does, such as loading a model."""

    def children(self, parent: int = 0) -> dict[int, str]:
        """Returns the command lines of the child processes of `parent`, or else of `up`, by process id."""
        return {pid: command_line(pid) for pid in children_of(parent or self.pid)}

    def device(self) -> int:
        """Returns the process id of the device's process."""
        processes = [
            pid
            for worker, command in self.children().items()
            if "blockrelay_worker" in command
            for pid, own in self.children(worker).items()
            if "execution.process" in own
        ]
        return processes[0]

    def shows_gpus(self) -> bool:
        """Returns whether the plan has blocks on GPUs."""
        return "GPU" in httpx.get(f"{self.url}/v1/plan", timeout=10, trust_env=False).json()["plan"].values()

    def ready_workers(self) -> int:
        """Returns the number of workers that are ready and send heartbeats; 0 while Redis is away."""
        try:
            with connect(read_running(self.data).redis_url) as client:
                return sum(w.ready and not w.is_late for w in read_workers(client, self.keys, self.model))
        except RedisTrouble:
            return 0

    def is_whole(self) -> bool:
        """Returns whether all workers are ready. It also has lost devices tried again."""
        with suppress(RedisTrouble), connect(read_running(self.data).redis_url) as client:
            for lost in read_lost_devices(client, self.keys):
                retry_lost_device(client, self.keys, lost)
        return self.ready_workers() == self.workers

    def worker_of(self, request_id: str) -> int:
        """Returns the process id of the worker that runs a request."""
        with connect(read_running(self.data).redis_url) as client:
            route = cast(bytes, client.hget(self.keys.request(request_id), "route")).decode()
        return int(route.split(":")[1])


def wait_until(condition: Callable[[], object], what: str, *, timeout_s: float = 60.0) -> None:
    """Waits until `condition` is true. Raises TimeoutError, which names `what` was awaited."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {timeout_s:g} s in vain for {what}")
        time.sleep(0.005)


@contextmanager
def running(
    model: Path, workers: int, options: Sequence[str], *, patience_s: float = 60.0
) -> Iterator[RecoveringSystem]:
    """Runs `blockrelay up` with `options`, and yields when `workers` workers are ready.

    Raises TimeoutError if they are not after `patience_s`, and IndexError if `up` ends before it is ready.
    """
    with tempfile.TemporaryDirectory(prefix="br-rec-") as data:
        argv = [sys.executable, "-P", "-m", "blockrelay_launcher", "up", "--model", str(model), "--port", "0"]
        argv += ["--data", data, *options]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            try:
                assert process.stdout is not None
                url = process.stdout.readline().split()[1]
                model_key = open_block_folder(model, blocks=[]).model_key
                keys = Keys(read_running(Path(data)).cell)
                system = RecoveringSystem(process.pid, url, Path(data), keys, model_key, workers, patience_s)
                wait_until(lambda: system.ready_workers() == workers, f"{workers} workers", timeout_s=patience_s)
                yield system
            finally:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                process.kill()


def accident(system: RecoveringSystem, what: str, prompts: list[list[int]]) -> tuple[float, int]:
    """Lets an accident (`what`) happen to streams of these prompts.

    Returns the longest stall of any stream in seconds, and the tokens of prompts that were computed again. Raises
    RuntimeError for a stream that failed, and TimeoutError for a system that does not recover.
    """
    if what == "device":
        wait_until(system.shows_gpus, "the plan has its stages", timeout_s=system.patience_s)
    tokens = BEFORE + AFTER * (1 if len(prompts) == 1 else 8)
    streams = [Stream(system.url, prompt, tokens, system.patience_s) for prompt in prompts]
    for stream in streams:
        stream.wait_for(BEFORE // 2 if len(streams) > 1 else BEFORE)
    frozen = 0
    if what == "redis":
        victim = next(pid for pid, command in system.children().items() if "control/redis.sock" in command)
        os.kill(victim, signal.SIGKILL)
    elif what == "device":
        os.kill(system.device(), signal.SIGKILL)
    else:
        victim = system.worker_of(streams[0].request_id)
        frozen = victim if what == "host" else 0
        os.kill(victim, signal.SIGSTOP if frozen else signal.SIGKILL)
    at = time.monotonic()
    try:
        stalls = [stream.stall_s(at) for stream in streams]
    finally:
        if frozen:
            os.kill(frozen, signal.SIGCONT)
    for stream in streams:
        if stream.trouble:
            raise RuntimeError(stream.trouble)
    again = sum(len(stream.prompt) - stream.cached for stream in streams)
    wait_until(system.is_whole, f"{system.workers} workers", timeout_s=system.patience_s)
    time.sleep(max(0.0, at + APART_S - time.monotonic()))
    return max(stalls), again


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the accidents happen, prints the figures, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="block folder")
    parser.add_argument("--accidents", default=",".join(ACCIDENTS), help="worker, host, redis or device, with commas")
    parser.add_argument("--device", default="cpu", help="the device to lose, as `up --gpu` names it")
    parser.add_argument("--times", type=int, default=20, help="accidents of each kind")
    parser.add_argument("--context", type=int, default=600, help="tokens known when the worker dies")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no accident after this many seconds")
    parser.add_argument("--patience", type=float, default=60, help="most seconds of a token, or of loading")
    parser.add_argument("--json", action="store_true")
    chosen, options = parser.parse_known_args(arguments)
    rng = random.Random(1)
    vocab = open_block_folder(chosen.model, blocks=[]).model.vocab_size
    figures: dict[str, dict[str, float]] = {}
    of_device = [what for what in chosen.accidents.split(",") if what == "device"]
    others = [what for what in chosen.accidents.split(",") if what != "device"]
    systems: list[tuple[list[str], int, list[str]]] = [
        (others, 2, ["--replicas", "2"]),
        (of_device, 4, ["--stages", "2", "--gpu", chosen.device]),
    ]
    began = time.monotonic()
    for accidents, workers, shape in systems:
        if not accidents:
            continue
        with running(chosen.model, workers, [*shape, *options], patience_s=chosen.patience) as system:
            for what in accidents:
                count, length = (STREAMS, 64) if what == "redis" else (1, chosen.context - BEFORE)
                results: list[tuple[float, int]] = []
                while len(results) < chosen.times and time.monotonic() - began < chosen.seconds:
                    prompts = [[rng.randrange(10, vocab) for _ in range(length)] for _ in range(count)]
                    results.append(accident(system, what, prompts))
                    if not chosen.json:
                        print(f"{what:8} {results[-1][0]:6.3f} s, {results[-1][1]} prompt tokens again", flush=True)
                if results:
                    stalls = [stall for stall, _ in results]
                    figures[what] = {
                        "times": len(results), "p50_s": round(median(stalls), 3),
                        "p99_s": round(percentile(stalls, 0.99), 3), "max_s": round(max(stalls), 3),
                        "prompt_rows_again": median(rows for _, rows in results),
                    }  # fmt: skip
    if chosen.json:
        print(json.dumps(figures))
    else:
        for what, figure in figures.items():
            print(f"{what:8} " + "  ".join(f"{name} {value:g}" for name, value in figure.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

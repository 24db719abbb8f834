"""Measures how many finished requests a Redis can keep: `python -m bench.scenarios.retention [--requests N] [--mib M]`.

It uses a Redis as `blockrelay up` starts it and the real scripts, with a simulated worker, so that no model is needed.
For each kind of request (a prompt of 32 tokens, an answer of 5 or 128; plain, or with an Idempotency-Key; run once, or
again after a death in the middle) `--requests` of them are accepted, claimed, committed and ended, 64 at once. Printed
are:

    bytes     bytes of used_memory that an ended request takes, with its share of the tables of keys, without its log
    kept/s    requests per second that half of `--mib` (above that FORGET begins) can keep for their retention, 900 s or
              with a key 3,600 s; the log, which stays for the first 15 s, is counted
    forgot/s  ended requests that FORGET removes in one second of Redis' CPU time: as many may end per second for any
              length of time, whatever the retention
    ms        milliseconds of a FORGET of 128 requests, for which all other commands wait

Ends are dated back, so that FORGET need not wait 10 s for the last of them. Figures are never asserted.
"""

import argparse
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from secrets import token_hex
from typing import Any, cast

import numpy as np
import redis
from prometheus_client import Counter

from blockrelay.protocol.constants import RETENTION_S, YIELD_SHARE
from blockrelay.protocol.encoding.end_meta import encode_end_meta
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import Claimed, Commit, RequestBody
from blockrelay.protocol.plan import parse_split
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.protocol.transitions import calls
from blockrelay.redis.client import Scripts, check_redis, connect
from blockrelay.redis.errors import RedisWatch
from blockrelay.redis.protocol_check import check_protocol
from blockrelay.settings import GatewaySettings, WorkerSettings
from blockrelay_gateway.policy import FORGOTTEN_A_CALL
from blockrelay_launcher.background import running_redis
from blockrelay_worker.lifecycle.registration import Registration, StageAssignment
from blockrelay_worker.transport.redis_links import Links

PROMPT, ANSWERS = 32, (5, 128)
#: Requests in flight at once; they begin and end together.
AT_ONCE = 64
#: Requests that end before the measurement, so that scripts are loaded and buffers allocated.
WARM_UP = 256
VOCABULARY, BLOCKS = 128_256, 17
MODEL, NUMERICS = "0123456789abcdef", "w8a8-0123456789abcdef"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request."""

    tokens: int
    """Tokens of its answer."""
    keyed: bool
    """True if it has an Idempotency-Key."""
    reruns: int
    """How often it runs again after a death."""

    @property
    def retention_s(self) -> int:
        """Seconds for which it is kept after its end."""
        return GatewaySettings().keyed_retention_s if self.keyed else RETENTION_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one kind; the module's docstring explains them."""

    bytes: float
    kept_per_s: float
    forgotten_per_cpu_s: float
    forget_ms: float


class SimulatedWorker:
    """A worker of the whole model and a gateway, which call the real scripts without computing anything."""

    def __init__(self, client: redis.Redis) -> None:
        self.client, self.keys = client, Keys("bench")
        check_protocol(client, self.keys, join=True)
        self.scripts = Scripts(client, self.keys)
        self.gateway, self.made = token_hex(8), np.random.default_rng(0)

    def register(self) -> None:
        """Registers the worker and its stage in Redis."""
        watch = RedisWatch(Counter("errors", "Redis errors of a simulated worker", registry=None))
        links = Links(self.client, self.client, self.keys, self.scripts, watch, threading.Event())
        registration = Registration(links, WorkerSettings(), model=MODEL, numerics=NUMERICS, port=0)
        self.worker_id, split = registration.worker_id, f"1-{BLOCKS}"
        registration.announce(StageAssignment(split, 0, parse_split(split)[0], epoch=0), pages=1 << 20, slots=AT_ONCE)

    def finish(self, kind: Kind, requests: int) -> float:
        """Takes requests from ACCEPT to their end, and deletes the logs that would stay for a while.

        Returns the mean cost of a log, in bytes x seconds.
        """
        costs = [self._finish_some(kind, min(AT_ONCE, requests - at)) for at in range(0, requests, AT_ONCE)]
        return sum(costs) / len(costs)

    def _finish_some(self, kind: Kind, requests: int) -> float:
        """Takes requests that run at once from ACCEPT to their end; returns the cost of a log (see `finish`)."""
        request_ids = [f"req-{token_hex(12)}" for _ in range(requests)]
        for request_id in request_ids:
            self._accept(request_id, kind)
        runs = self._claim(requests)
        self._commit(runs, 0, kind.tokens // 2)
        for _ in range(kind.reruns):
            for run in runs:
                self.scripts.run(calls.rerun(run.request_id, run.run_id, "death"))
            runs = self._claim(requests)
        self._commit(runs, kind.tokens // 2, kind.tokens, end=True)
        self.client.xtrim(self.keys.inbox(self.worker_id), maxlen=0)
        logs = [self.keys.log(request_id) for request_id in request_ids]
        seconds = self.client.ttl(logs[0])
        if seconds > kind.retention_s // 2:
            return 0.0  # the logs stay as long as the requests
        size = self.client.memory_usage(logs[0])
        self.client.delete(*logs)
        return (size or 0) * seconds

    def _accept(self, request_id: str, kind: Kind) -> None:
        """Accepts a request of a kind, with a random prompt."""
        params = SamplingParams(max_tokens=kind.tokens, temperature=0.7, seed=int(self.made.integers(2**53)))
        prompt = self.made.integers(3, VOCABULARY, PROMPT).astype(np.int32)
        body = RequestBody(prompt=prompt, params=params.to_dict(), gateway=self.gateway)
        key: dict[str, Any] = {"fingerprint": token_hex(32), "retention_s": kind.retention_s} if kind.keyed else {}
        need = -(-(PROMPT + kind.tokens) // 16)
        call = calls.accept(request_id, body, model=MODEL, pages_needed=need, max_in_flight=AT_ONCE, **key)
        assert self.scripts.run(call).status == "OK"

    def _claim(self, requests: int) -> list[Claimed]:
        """Claims until this many runs have begun."""
        runs: list[Claimed] = []
        while len(runs) < requests:  # Redis delays a second re-run at the same position a little
            self.scripts.run(calls.heartbeat(self.worker_id))
            call = calls.claim(self.worker_id, requests - len(runs), free_pages=1 << 20)
            runs += self.scripts.run(call)
        return runs

    def _commit(self, runs: Sequence[Claimed], first: int, last: int, *, end: bool = False) -> None:
        """Commits the tokens from `first` to `last` (exclusive) of all runs, with one COMMIT for each position."""
        for at in range(first, last):
            over = end and at == last - 1
            tokens = self.made.integers(3, VOCABULARY, len(runs)).tolist()
            commits = [
                Commit(
                    request_id=run.request_id, run_id=run.run_id, position=at, tokens=(token,),
                    end="length" if over else "", meta=self._meta() if over else "",
                )
                for run, token in zip(runs, tokens, strict=True)
            ]  # fmt: skip
            assert {answer.verdict for answer in self.scripts.run(calls.commit(commits))} == {"OK"}

    def _meta(self) -> str:
        """Returns metadata of an end like that of a real last stage."""
        times = self.made.uniform(0.01, 0.9, BLOCKS).tolist()
        return encode_end_meta(
            {
                "execution_times": {f"block_{number + 1}": seconds for number, seconds in enumerate(times)},
                "gpu_blocks": [],
                "route": [self.worker_id],
                "seed": int(self.made.integers(2**53)),
                "cached_tokens": 16,
            }
        )

    def info(self, section: str) -> dict[str, Any]:
        """Returns a section of INFO."""
        return self.client.info(section)

    def used(self) -> int:
        """Returns the bytes of memory that Redis uses."""
        return int(self.info("memory")["used_memory"])

    def forget_all(self, kind: Kind) -> tuple[float, float]:
        """Has all ended requests forgotten; returns requests per second of Redis' CPU, and milliseconds per call."""
        ended = self.keys.ended("last" if kind.keyed else "first")
        request_ids = cast(list[bytes], self.client.lrange(ended, 0, -1))
        for at in range(0, len(request_ids), FORGOTTEN_A_CALL):
            aged = self.client.pipeline(transaction=False)
            for request_id in request_ids[at : at + FORGOTTEN_A_CALL]:
                aged.hset(self.keys.request(request_id.decode()), "progress_ms", "1700000000000")
            aged.execute()
        self.client.config_resetstat()
        before = self._cpu_s()
        gone = sum(
            self.scripts.run(calls.forget(FORGOTTEN_A_CALL))[0] for _ in range(len(request_ids) // FORGOTTEN_A_CALL)
        )
        spent = self.info("commandstats")["cmdstat_evalsha"]
        return gone / (self._cpu_s() - before), spent["usec_per_call"] / 1000

    def _cpu_s(self) -> float:
        cpu = self.info("cpu")
        return cpu["used_cpu_user"] + cpu["used_cpu_sys"]


@contextmanager
def server() -> Iterator[redis.Redis]:
    """Starts a control Redis, and yields a client for it."""
    with running_redis(durable=True) as url, connect(url) as client:
        check_redis(client, "Redis")
        yield client


def measure(kind: Kind, requests: int, mib: int) -> Figures:
    """Measures one kind on a server of its own, for a Redis of `mib` MiB."""
    with server() as client:
        worker = SimulatedWorker(client)
        worker.register()
        empty = worker.used()
        worker.finish(kind, WARM_UP)
        before = worker.used()
        log_cost = worker.finish(kind, requests)
        each = (worker.used() - before) / requests
        kept = (YIELD_SHARE * (mib << 20) - empty) / (each * kind.retention_s + log_cost)
        forgotten, ms = worker.forget_all(kind)
        return Figures(bytes=each, kept_per_s=kept, forgotten_per_cpu_s=forgotten, forget_ms=ms)


def main(arguments: list[str] | None = None) -> int:
    """Measures all kinds, prints the figures, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=6000, help="requests of each kind, 128 or more")
    parser.add_argument("--mib", type=int, default=1024, help="maxmemory in MiB of the Redis to compute kept/s for")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    if chosen.requests < FORGOTTEN_A_CALL:
        parser.error(f"--requests must be {FORGOTTEN_A_CALL} or more")
    for tokens, keyed, reruns in product(ANSWERS, (False, True), (0, 1)):
        kind = Kind(tokens, keyed, reruns)
        figures = measure(kind, chosen.requests, chosen.mib)
        if chosen.json:
            print(json.dumps(asdict(kind) | asdict(figures)), flush=True)
            continue
        name = f"{tokens} tokens, {'keyed' if keyed else 'plain'}, {reruns} re-runs"
        print(
            f"{name:28}  bytes {figures.bytes:6.0f}  kept/s {figures.kept_per_s:6.0f} ({kind.retention_s} s)  "
            f"forgot/s {figures.forgotten_per_cpu_s:8.0f}  ms {figures.forget_ms:5.2f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A cell at the level of the protocol: real Redis, real scripts, workers that are played by the test."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import redis

from blockrelay.protocol.capabilities import Capabilities
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import Claimed, Commit, CommitAnswer, EndEntry, LogEntry, RequestBody
from blockrelay.protocol.number import PROTOCOL
from blockrelay.protocol.plan import Device
from blockrelay.protocol.records.ended import decode_log, whole_log, whole_record
from blockrelay.protocol.records.timeline import timeline
from blockrelay.protocol.transitions import calls
from blockrelay.redis.cell_settings import CellSettings, publish_cell_settings
from blockrelay.redis.client import Scripts
from tests.support.worker.registering import announce

MODEL = "0123456789abcdef"


def body(tokens: list[int] | None = None, **params: object) -> RequestBody:
    prompt = np.array(tokens or [1, 2, 3], np.int32)
    return RequestBody(prompt=prompt, params={"max_tokens": 8, **params})


def begin_cell(client: redis.Redis, *cells: Keys) -> None:
    """Empty a Redis but for new cells, as who joins them first leaves them; nobody sees it without them."""
    together = client.pipeline(transaction=True)
    together.flushall()
    for keys in cells:
        together.set(keys.protocol, PROTOCOL)
    together.execute()


def read_log(client: redis.Redis, keys: Keys, request_id: str) -> list[LogEntry]:
    """All entries of a request's log, wherever they are."""
    record, log = client.hgetall(keys.request(request_id)), client.xrange(keys.log(request_id))
    return decode_log(whole_log(record, log))  # pyright: ignore[reportArgumentType]


def read_timeline(client: redis.Redis, keys: Keys, request_id: str) -> list[dict[str, Any]]:
    """What happened to a request, running or ended."""
    record, log = client.hgetall(keys.request(request_id)), client.xrange(keys.log(request_id))
    return timeline(whole_record(record, log))  # pyright: ignore[reportArgumentType]


@dataclass
class Cell:
    client: redis.Redis
    keys: Keys
    scripts: Scripts
    workers: list[str] = field(default_factory=list[str])

    def now_ms(self) -> int:
        """Redis' clock, which decides about deadlines."""
        seconds, micros = self.client.time()  # pyright: ignore[reportGeneralTypeIssues]
        return int(seconds) * 1000 + int(micros) // 1000

    def worker(
        self,
        name: str,
        *,
        stage: int = 0,
        split: str = "1-2,3-4",
        device: Device = "cpu",
        pages: int = 100,
        slots: int = 64,
        numerics: str = "n1",
        capabilities: Capabilities | None = None,
        varies: bool = False,
        slow: str = "",
        succeeds: str = "",
        loads_beside: bool = False,
    ) -> str:
        """Register a ready worker."""
        announce(
            self.client, self.keys, name,
            model=MODEL, split=split, stage=stage, device=device, pages=pages, slots=slots, numerics=numerics,
            capabilities=capabilities, varies=varies, slow=slow, succeeds=succeeds,
            loads_beside=loads_beside,
        )  # fmt: skip
        self.workers.append(name)
        return name

    def a_second_passes(self) -> None:
        """So that scripts read the registry again."""
        self.client.delete(self.keys.fleet(MODEL))

    def accept(self, request_id: str = "req-1", *, need: int = 2, limit: int = 100, **more: object) -> calls.Accepted:
        content = more.pop("content", None)
        assert content is None or isinstance(content, RequestBody)
        return self.scripts.run(
            calls.accept(request_id, content or body(), model=MODEL, pages_needed=need, max_in_flight=limit, **more)  # pyright: ignore[reportArgumentType]
        )

    def agree(self, *, retention_s: int = 60, dead_after_s: int = 3) -> None:
        """From now on these hold for the cell, as if a scheduler had said so."""
        settings = CellSettings(retention_s=retention_s, dead_after_ms=1000 * dead_after_s)
        publish_cell_settings(self.client, self.keys, settings)

    def claim(self, worker_id: str, most: int = 8, *, free: int = 1000) -> list[Claimed]:
        return self.scripts.run(calls.claim(worker_id, most, free_pages=free))

    def begin(
        self, worker_id: str, tokens: Sequence[int] = (), *, request_id: str = "req-1", **more: object
    ) -> Claimed:
        """A request that `worker_id` has claimed, alone, and whose first tokens, if any, it has committed."""
        self.accept(request_id, **more)  # pyright: ignore[reportArgumentType]
        (run,) = self.claim(worker_id)
        if tokens:
            self.commit(run, 0, list(tokens))
        return run

    def commit(self, run: Claimed, position: int, tokens: list[int], *, end: str = "", **more: object) -> CommitAnswer:
        item = Commit(
            request_id=run.request_id, run_id=run.run_id, position=position, tokens=tuple(tokens), end=end, **more  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
        return self.scripts.run(calls.commit([item]))[0]

    def rerun(self, run: Claimed, reason: str = "stalled", **more: object) -> bool:
        return self.scripts.run(calls.rerun(run.request_id, run.run_id, reason, **more)).ended  # pyright: ignore[reportArgumentType]

    def record(self, request_id: str = "req-1") -> dict[str, str]:
        raw = self.client.hgetall(self.keys.request(request_id))
        return {k.decode(): v.decode("latin-1") for k, v in raw.items()}  # pyright: ignore

    def log(self, request_id: str = "req-1") -> list[LogEntry]:
        return read_log(self.client, self.keys, request_id)

    def end(self, request_id: str = "req-1") -> EndEntry:
        """The last entry of its log, which must be its end."""
        end = self.log(request_id)[-1]
        assert isinstance(end, EndEntry), end
        return end

    def timeline(self, request_id: str = "req-1") -> list[dict[str, Any]]:
        return read_timeline(self.client, self.keys, request_id)

    def reserved(self, worker_id: str) -> int:
        return int(self.client.hget(self.keys.worker(worker_id), "pages_reserved") or 0)  # pyright: ignore

    def requests_of_worker(self, worker_id: str) -> set[str]:
        return {m.decode() for m in self.client.smembers(self.keys.worker_requests(worker_id))}  # pyright: ignore

    def queued(self, stream: str = "queue", route_class: str = "cpu") -> list[str]:
        """First runs by rank, or all re-runs that are due."""
        if stream == "queue":
            return [m.decode() for m in self.client.zrange(self.keys.queue(MODEL, route_class), 0, -1)]  # pyright: ignore
        return self.open_reruns(route_class) + self.pinned("*", route_class)

    def open_reruns(self, route_class: str = "cpu") -> list[str]:
        """Re-runs for any worker."""
        return self._entries(self.keys.reruns(MODEL, route_class))

    def pinned(self, numerics: str, route_class: str = "cpu") -> list[str]:
        """Re-runs for workers of a numerics id; `*`: of each."""
        keys = sorted(self.client.keys(self.keys.pinned(MODEL, route_class, numerics)))  # pyright: ignore
        return [request_id for key in keys for request_id in self._entries(key)]

    def _entries(self, key: str | bytes) -> list[str]:
        return [f[b"request"].decode() for _, f in self.client.xrange(key)]  # pyright: ignore

    def due(self) -> set[str]:
        return {m.decode() for m in self.client.zrange(self.keys.due(MODEL, "cpu"), 0, -1)}  # pyright: ignore

    def totals(self) -> tuple[int, int]:
        """How many requests were ever accepted, and how many have ended."""
        raw = cast("dict[bytes, bytes]", self.client.hgetall(self.keys.totals(MODEL)))
        ended = sum(int(count) for name, count in raw.items() if name.startswith(b"ended:"))
        return int(raw.get(b"accepted", 0)), ended

    def outstanding(self) -> dict[str, int]:
        """What `outstanding:<model>` has, without zeros."""
        raw = self.client.hgetall(self.keys.outstanding(MODEL))
        return {k.decode(): int(v) for k, v in raw.items() if int(v)}  # pyright: ignore

    def requests_of_tenant(self, tenant: str) -> set[str]:
        return {m.decode() for m in self.client.smembers(self.keys.key("tenant-requests", tenant))}  # pyright: ignore

    def everything(self) -> dict[bytes, bytes]:
        """The content of every key but those that only repeat what others say."""
        return {key: self.client.dump(key) for key in self.client.keys("*") if b":fleet:" not in key}  # pyright: ignore

    def inbox(self, worker_id: str, kind: bytes = b"next_job") -> list[dict[bytes, bytes]]:
        """Entries of one kind: next_job or ended."""
        return [f for _, f in self.client.xrange(self.keys.inbox(worker_id)) if kind in f]  # pyright: ignore

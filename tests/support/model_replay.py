"""The model's scripts beside the real ones: every call of a walk is made on a real server, and both must agree.

What the model leaves open is set before a call: which workers beat, whose deadline has passed, that delays are over.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest

from blockrelay.protocol.encoding.fallback_policy import limited_to
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import Claimed, Commit, EndEntry, NextJob, RequestBody, TokenEntry
from blockrelay.protocol.plan import Device, Plan
from blockrelay.protocol.transitions import calls
from blockrelay.redis.client import Scripts
from blockrelay.redis.registry import read_workers
from blockrelay_worker.lifecycle.changes.retirement import Retirement
from tests.protocol_model import data, scripts
from tests.protocol_model.bounds import Bounds, name_of
from tests.support.cell import MODEL, Cell, begin_cell
from tests.support.redis.redis_server import RedisServer
from tests.support.worker.links import links_of

NAMES = (
    "accept",
    "claim",
    "commit",
    "rerun",
    "finish",
    "dead",
    "beat",
    "migrate",
    "forget",
    "announce",
    "take",
    "name",
    "look",
    "stay",
)
#: Tokens that one unit of the model costs its tenant's share.
UNIT = 64
#: Ends with an error of ours, as the model calls them.
CODES = {
    "poison": "poison",
    "numerics_changed": "numerics",
    "fallback_denied": "denied",
    "fallback_too_slow": "too_slow",
}
#: The stages of each plan, by their number.
SPLITS = {1: ("1-4", "1-4"), 2: ("1-2,3-4", "1-3,4-4")}


@dataclass(frozen=True)
class Recorded:
    """One call of a model's script: from `before` to `after`."""

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    before: data.Redis
    after: data.Redis
    answer: Any


@contextmanager
def recording(patch: pytest.MonkeyPatch) -> Iterator[list[Recorded]]:
    """Every call of a script while it lasts."""
    made: list[Recorded] = []

    def recorder(name: str, script: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **options: Any) -> Any:
            result = script(*args, **options)
            after, answer = (result, None) if isinstance(result, data.Redis) else result
            plain = args[1:] if isinstance(args[0], Bounds) else args
            made.append(Recorded(name, plain[1:], options, plain[0], after, answer))
            return result

        return record

    with patch.context() as patched:
        for name in NAMES:
            patched.setattr(scripts, name, recorder(name, getattr(scripts, name)))
        yield made


def way(made: list[Recorded], start: data.Redis, goal: data.Redis) -> list[Recorded]:
    """The calls that lead from one state of Redis to another."""
    ways: dict[data.Redis, list[Recorded]] = {start: []}
    waiting = [start]
    for at in waiting:
        if at == goal:
            return ways[at]
        for call in made:
            if call.before == at and call.after not in ways:
                ways[call.after] = [*ways[at], call]
                waiting.append(call.after)
    raise AssertionError("no calls lead there")


class Replay:
    """Makes calls of the model on a real server and compares answers and what is in Redis."""

    def __init__(self, bounds: Bounds, server: RedisServer) -> None:
        self.bounds, self.server = bounds, server
        self.client, self.keys = server.client(), Keys("t")
        begin_cell(self.client, self.keys)
        self.cell = Cell(self.client, self.keys, Scripts(self.client, self.keys))
        self.cell.agree(retention_s=600, dead_after_s=3600)
        self.route_class: Device = "gpu" if bounds.handover and bounds.for_gpu else "cpu"
        plan = calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class=self.route_class, plan="{}")
        self.cell.scripts.run(plan)
        self.known: set[int] = set()
        self._retirements: dict[str, Retirement] = {}

    def worker(self, number: int) -> str:
        return f"w{number:04}"

    def request(self, number: int) -> str:
        return f"req-{number}"

    def number(self, name: str) -> int:
        return int(name.removeprefix("req-").removeprefix("w"))

    def crash(self, size: int) -> None:
        """kill -9, and what was written behind `size` bytes is lost."""
        self.server.kill()
        self.server.truncate_aof(size)
        self.server.start()
        self.client.connection_pool.disconnect()
        self.cell.agree(retention_s=600, dead_after_s=3600)

    def make(self, call: Recorded) -> None:
        """Make a call. AssertionError when the answer is not the model's."""
        self._set_clock(call.options)
        answer = getattr(self, f"_{call.name}")(*call.args, **call.options)
        assert answer == call.answer, f"{call.name}{call.args}: {answer}, not {call.answer}"

    def _set_clock(self, options: dict[str, Any]) -> None:
        now = int(self.client.time()[0]) * 1000  # pyright: ignore
        for worker in self.known:
            if self.client.zscore(self.keys.workers, self.worker(worker)) is not None:
                young = worker in options.get("beating", self.known)
                self.client.zadd(self.keys.workers, {self.worker(worker): now if young else 1})
        for request in options.get("overdue", ()):
            record = self.keys.request(self.request(request))
            if self.client.exists(record):  # it may have been forgotten
                self.client.hset(record, "deadline_ms", 1)
        for member in self.client.zrange(self.keys.delayed, 0, -1):  # pyright: ignore
            self.client.zadd(self.keys.delayed, {member: 0})  # pyright: ignore

    # --- calls ---

    def _accept(
        self,
        request: int,
        *,
        tenant: int = 0,
        pages_needed: int = 0,
        step: int = 0,
        prior: int = 0,
        body: tuple[int, ...] = (),
    ) -> tuple[str, int]:
        prompt = self.bounds.prompt
        params = {"max_tokens": pages_needed * UNIT - prompt}
        content = RequestBody(
            prompt=np.arange(prompt, dtype=np.int32),
            params=params,
            logits="last" if step else "none",
            exact=request in self.bounds.exact,
            fallback="deny"
            if request in self.bounds.deny
            else limited_to(1.0)  # nothing is predicted in this cell, so every CPU is too slow
            if request in self.bounds.limited
            else "recompute"
            if request in self.bounds.recompute
            else "allow",
        )
        part = None
        if step:
            part = calls.SessionStep("s", step, f"f{step}", prior, step.to_bytes(4, "little"))
        answer = self.cell.scripts.run(
            calls.accept(
                self.request(request), content, model=MODEL, pages_needed=pages_needed, max_in_flight=99, session=part,
                tenant=f"t{tenant}",
            )
        )  # fmt: skip
        detail = self.number(answer.detail) if answer.status in ("STEP", "REPEAT") else 0
        return answer.status, detail

    def _claim(self, worker: int, most: int, nonces: range, *, free: int = 0, **_: Any) -> list[scripts.Claimed]:
        call = calls.claim(self.worker(worker), most, free_pages=free)
        call = replace(call, arguments={**call.arguments, "runs": [str(n) for n in nonces[:most]]})
        return [self._claimed(claimed) for claimed in self.cell.scripts.run(call)]

    def _claimed(self, c: Claimed) -> scripts.Claimed:
        route = tuple(self.number(w) for w in c.route)
        found = scripts.Claimed(self.number(c.request_id), int(c.run_id), route, c.quarantined, len(c.tokens))
        if not self.bounds.handover:
            return found
        return found._replace(reusable=-1 if c.reusable is None else c.reusable, private=c.private)

    def _commit(self, items: tuple[data.Commit, ...], **_: Any) -> list[tuple[str, int]]:
        sent = [
            Commit(
                request_id=self.request(i.request), run_id=str(i.run), position=i.position, tokens=i.tokens, end=i.end  # pyright: ignore
            )
            for i in items
        ]  # fmt: skip
        return [(a.verdict, a.length) for a in self.cell.scripts.run(calls.commit(sent))]

    def _rerun(self, request: int, run: int, reason: Any, *, failed: int = -1, found: int = -1) -> bool:
        block = f"block_{2 * failed + 1}" if failed >= 0 else ""
        lacking = None if found < 0 else found
        call = calls.rerun(self.request(request), str(run), reason, block=block, stage=max(0, failed), found=lacking)
        return self.cell.scripts.run(call).ended

    def _finish(self, request: int, reason: Any, run: int = 0, *, denied: bool = False, abandoned: bool = False) -> str:
        meta = None
        if reason == "denied":
            reason, meta = "error", {"code": "fallback_denied"}
        name = self.request(request)
        call = calls.finish(name, reason, meta=meta, run_id=str(run) if run else "", denied=denied, abandoned=abandoned)
        return self.cell.scripts.run(call)

    def _dead(self, worker: int, reason: Any = "death") -> tuple[bool, int]:
        return self.cell.scripts.run(calls.dead(self.worker(worker), silent_s=0, reason=reason))

    def _forget(self, request: int) -> bool:
        """The only one that is old enough, if it has ended."""
        now = int(self.client.time()[0]) * 1000  # pyright: ignore
        for number in range(self.bounds.requests):
            name = self.request(number)
            if self.client.hget(self.keys.request(name), "state") == b"done":
                self.client.hset(self.keys.request(name), "progress_ms", 1 if number == request else now)
        return self.cell.scripts.run(calls.forget(1))[0] == 1

    def _beat(self, worker: int) -> dict[int, int] | None:
        answer = self.cell.scripts.run(calls.heartbeat(self.worker(worker)))
        return None if answer is None else {self.number(r): int(run_id) for r, run_id in answer.items()}

    def _migrate(self, **_: Any) -> int:
        return sum(found.freed for found in self.cell.scripts.run(calls.migrate(MODEL, patience_s=0)))

    def _announce(self, worker: int, pages: int) -> None:
        b = self.bounds
        self.known.add(worker)
        split = SPLITS[b.stages][b.plan(worker)]
        self.cell.worker(self.worker(worker), stage=b.stage(worker), split=split, pages=pages,
                         numerics=f"n{b.numerics(worker)}", varies=b.varies(b.numerics(worker)),
                         device="gpu" if b.is_gpu(worker) else "cpu")  # fmt: skip

    def _look(self, worker: int, *, told: tuple[int, ...], **_: Any) -> bool:
        workers = read_workers(self.client, self.keys, MODEL)
        staying = {self.worker(known): MODEL for known in self.known if known not in told}
        plan = Plan(
            epoch=2, split="", route_class="cpu", assignments=dict.fromkeys((w.id for w in workers), 0), blocks={},
            reasons=(), folder="another", other_folders=staying,
        )  # fmt: skip
        return self._retirement(worker).is_complete(plan, workers)

    def _stay(self, worker: int) -> None:
        self._retirement(worker).call_off()

    def _retirement(self, worker: int) -> Retirement:
        b, name = self.bounds, self.worker(worker)
        split, numerics = SPLITS[b.stages][b.plan(worker)], f"n{b.numerics(worker)}"
        made = Retirement(links_of(self.cell), MODEL, name, split=split, folder=MODEL, numerics=numerics)
        return self._retirements.setdefault(name, made)  # a worker keeps its own

    def _take(self, worker: int) -> None:
        inbox = self.keys.inbox(self.worker(worker))
        entry = next(i for i, fields in self.client.xrange(inbox) if b"next_job" in fields)  # pyright: ignore
        self.client.xdel(inbox, entry)  # pyright: ignore

    def _name(self, worker: int, request: int | None) -> None:
        key = self.keys.quarantine(self.worker(worker))
        if request is None:
            self.client.delete(key)
        else:
            self.client.set(key, self.request(request))

    # --- what is in Redis ---

    def state(self) -> data.Redis:
        """Redis as the model sees it."""
        cell = self.cell
        shares = {k.decode(): int(v) - (128 << 44) for k, v in self.client.zrange(  # pyright: ignore
            f"{{t}}:shares:{MODEL}:{self.route_class}", 0, -1, withscores=True)}  # fmt: skip
        queue = self.client.zrange(f"{{t}}:queue:{MODEL}:{self.route_class}", 0, -1, withscores=True)
        tenants = {k.split(" t")[-1]: v for k, v in shares.items() if k.startswith("t ")}
        session: dict[str, bytes] = {
            k.decode(): v  # pyright: ignore
            for k, v in self.client.hgetall(self.keys.session("s")).items()  # pyright: ignore
        }
        return data.Redis(
            requests=tuple(self._record(self.request(number)) for number in range(self.bounds.requests)),
            workers=tuple((w, self._worker(self.worker(w))) for w in sorted(self.known) if self._exists(w)),
            queue=tuple(((int(rank) - (128 << 44)) // UNIT, self.number(r.decode())) for r, rank in queue),  # pyright: ignore
            shares=tuple(sorted((int(tenant), at // UNIT) for tenant, at in tenants.items())),
            virtual=shares.get("v 0", 0) // UNIT,
            reruns=tuple(self.number(r) for c in ("cpu", "gpu") for r in cell.open_reruns(c)),
            pinned=tuple(self.number(r) for c in ("cpu", "gpu") for r in cell.pinned("*", c)),
            delayed=tuple(sorted(self.number(r.decode()) for r in self.client.zrange(self.keys.delayed, 0, -1))),  # pyright: ignore
            running=tuple(sorted(self.number(r.decode()) for r in self.client.zrange(self.keys.running, 0, -1))),  # pyright: ignore
            letters=tuple(self.number(f[b"request"].decode()) for _, f in self.client.xrange(self.keys.dead_letters)),  # pyright: ignore
            session=data.Session(
                int(session["step"]),
                self.number(session["request"].decode()),
                tuple(np.frombuffer(session["tokens"], "<u4").tolist()),
            )
            if session
            else None,
        )

    def _exists(self, worker: int) -> bool:
        return bool(self.client.exists(self.keys.worker(self.worker(worker))))

    def _record(self, name: str) -> data.Record | None:
        r = self.cell.record(name)
        if not r:
            return None
        log = self.cell.log(name)
        b = self.bounds
        numerics = log[-1].numerics if log and isinstance(log[-1], EndEntry) else r.get("numerics", "")
        return data.Record(
            state=r["state"],  # pyright: ignore
            run=int(r.get("run") or 0),
            route=tuple(self.number(w) for w in r.get("route", "").split(",") if w),
            log=tuple(e.token for e in log if isinstance(e, TokenEntry)),
            ends=tuple(CODES.get(e.meta.get("code", ""), e.reason) for e in log if isinstance(e, EndEntry)),
            abandoned="abandoned" in r,
            job=r.get("job", "").split(" ")[0],  # pyright: ignore
            pages_needed=int(r.get("pages_needed", 0)),
            pages_reserved=int(r.get("pages_reserved", 0)) if r["state"] == "running" else 0,
            deaths=min(int(r.get("deaths", 0)), b.quarantine_after),
            quarantine_deaths=int(r.get("quarantine_deaths", 0)),
            attempts=min(int(r.get("attempts", 0)), 2),
            deaths_at=int(r.get("deaths_at", 0)),
            tenant=int(r["tenant"].removeprefix("t")),
            numerics=_history(numerics) if b.ids else (),
            **(self._handed_over(name, r) if b.handover else {}),
        )

    def _handed_over(self, name: str, r: dict[str, str]) -> dict[str, Any]:
        """What a record says for devices that vary."""
        entries = cast(list[tuple[bytes, dict[bytes, bytes]]], self.client.xrange(self.keys.log(name)))
        said = [b"varies" in fields for _, fields in entries]
        if r["state"] == "done":
            said = said[-1:] * int(r.get("committed", 0))
        blocks = [event["block_id"] for event in json.loads(r.get("fallbacks") or "[]")]
        return {
            "for_gpu": r.get("class") == "gpu",
            "failed": self._stages(" ".join(blocks)),
            "denied": self._stages(r.get("denied_block", "")),
            "private": r.get("private") == "1",
            "reusable": int(r.get("reusable", -1)),
            "missing_pages": min(2, int(r.get("missing_pages", 0))),
            "flagged": tuple(at for at, varies in enumerate(said) if varies),
        }

    def _stages(self, blocks: str) -> tuple[int, ...]:
        return tuple(
            sorted({(int(block) - 1) // 2 if self.bounds.stages > 1 else 0 for block in re.findall(r"\d+", blocks)})
        )

    def _worker(self, name: str) -> data.WorkerRecord:
        jobs = [NextJob.decode(f[b"next_job"]) for f in self.cell.inbox(name)]
        quarantine = self.client.get(self.keys.quarantine(name))
        return data.WorkerRecord(
            pages=int(self.client.hget(self.keys.worker(name), "pages") or 0),  # pyright: ignore
            reserved=self.cell.reserved(name),
            inbox=tuple(data.NextJob(self.number(j.request_id), int(j.run_id), j.position, j.tokens) for j in jobs),
            on=tuple(sorted(self.number(r) for r in self.cell.requests_of_worker(name))),
            quarantine=None if quarantine is None else self.number(quarantine.decode()),  # pyright: ignore
            retires=bool(self.client.hexists(self.keys.worker(name), "retires")),
        )


def _history(numerics: str) -> tuple[tuple[int, int], ...]:
    """`n0+n0/n1@2` as ((0, 0), (the mix of 0 and 1, 2))."""
    parts = [part.split("@") for part in numerics.split("+") if part]
    return tuple((_name(name), int(at[0]) if at else 0) for name, *at in parts)


def _name(numerics: str) -> int:
    return name_of([int(one.removeprefix("n")) for one in numerics.split("/")])


def comparable(redis: data.Redis) -> data.Redis:
    """Without what the model keeps for itself, and where the order in which DEAD re-runs is open."""
    requests = tuple(
        r and r._replace(trials=(), body=(), forsaken=False, places=(), late=False) for r in redis.requests
    )
    return redis._replace(requests=requests, reruns=tuple(sorted(redis.reruns)), pinned=tuple(sorted(redis.pinned)))

"""The scripts as a state machine on a real server: random calls, deaths, stale runs and retries; the invariants hold.

Invariants, numbered as docs/protocol.md names them:
  I1  the log is append-only and a token at a position never changes
  I2  a request is unfinished exactly when it is in `running`
  I3  a request is queued exactly when one job entry or one delay names it; running when all its route carries it
  I4  a worker's reservations are the needs of what is on it
  I5  terminal is absorbing: one terminal entry, nothing after it
  I6  the books of the model, and each tenant's set, are the sums over its unfinished requests, those of results the
      sums over what is promised or may still be there
"""

import tempfile
from collections import Counter
from math import inf
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import Claimed, EndEntry, TokenEntry
from blockrelay.protocol.transitions import calls
from blockrelay.redis.protocol_check import check_protocol
from tests.support.cell import Cell
from tests.support.redis.redis_server import RedisServer
from tests.support.redis.rights import ConfinedScripts

STAGES = 2
REQUESTS = [f"req-{i}" for i in range(4)]
FAR = 1 << 46  # ms
WORKERS = {"a0": 0, "a1": 0, "b0": 1, "b1": 1}


def token(request_id: str, position: int) -> int:
    """The token function of this test: a pure function of request and position, as the real one is."""
    return crc32(f"{request_id}/{position}".encode()) % 1000


class ScriptMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="br-machine-")
        self.server = RedisServer(Path(self.folder.name)).start()
        client, keys = self.server.client(), Keys("t")
        check_protocol(client, keys, join=True)
        self.scripts = ConfinedScripts(client, keys)
        self.cell = Cell(client, keys, self.scripts)
        self.runs: list[Claimed] = []
        self.history: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.lives = 0

    def teardown(self) -> None:
        self.scripts.close()
        self.cell.client.close()
        self.server.assert_nothing_is_ownerless()
        self.server.stop()
        self.folder.cleanup()

    @initialize()
    def workers_come(self) -> None:
        self.names = {slot: self.register(slot) for slot in WORKERS}

    def register(self, slot: str) -> str:
        self.lives += 1
        return self.cell.worker(f"{slot}-{self.lives}", stage=WORKERS[slot], pages=8)

    @rule(
        request_id=st.sampled_from(REQUESTS),
        need=st.integers(1, 4),
        tenant=st.sampled_from(["", "ada"]),
        priority=st.integers(-1, 1),
        deadline_ms=st.sampled_from([0, FAR]),
        result_bytes=st.sampled_from([0, 7, 100]),
    )
    def accept(
        self, request_id: str, need: int, tenant: str, priority: int, deadline_ms: int, result_bytes: int
    ) -> None:
        answer = self.cell.accept(
            request_id,
            need=need,
            tenant=tenant,
            priority=priority,
            deadline_ms=deadline_ms,
            weight=0.5,
            result_bytes=result_bytes,
        )
        assert answer.status == ("EXISTS" if request_id in self.history else "OK")
        self.history.setdefault(request_id, [])

    @precondition(lambda self: len(self.history) < len(REQUESTS))
    @rule(limits=st.sampled_from([calls.Limits(tokens_per_minute=5), calls.Limits(concurrency=1)]), data=st.data())
    def refuse(self, limits: calls.Limits, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from([r for r in REQUESTS if r not in self.history]))
        others = [r for r in self.history if r not in self.ended and self.cell.record(r)["tenant"] == "ada"]
        if limits.concurrency and not others:
            return
        before = self.cell.everything()
        answer = self.cell.accept(request_id, tenant="ada", limits=limits)
        assert answer.status == ("CONCURRENT" if limits.concurrency else "TOKENS")
        assert self.cell.everything() == before, "a refusal leaves nothing"

    @rule(slot=st.sampled_from(["a0", "a1"]), most=st.integers(1, 3))
    def claim(self, slot: str, most: int) -> None:
        self.runs += self.cell.claim(self.names[slot], most)

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), count=st.integers(1, 2), ends=st.booleans(), twice=st.booleans())
    def commit(self, data: st.DataObject, count: int, ends: bool, twice: bool) -> None:
        """By any run ever claimed, current or stale, at any position that it may believe in."""
        run = data.draw(st.sampled_from(self.runs))
        position = data.draw(st.integers(0, len(self.history[run.request_id]) + 1))
        tokens = [token(run.request_id, position + k) for k in range(count)]
        for _ in range(1 + twice):
            answer = self.cell.commit(run, position, tokens, end="stop" if ends else "")
            assert answer.verdict in ("OK", "LOST", "GAP")

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def commit_another_token(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.runs))
        if self.history[run.request_id]:
            assert self.cell.commit(run, 0, [1001]).verdict in ("DIVERGED", "LOST")

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), reason=st.sampled_from(["stalled", "missing_pages", "drain"]))
    def rerun(self, data: st.DataObject, reason: str) -> None:
        run = data.draw(st.sampled_from(self.runs))
        current = self.cell.record(run.request_id).get("run") == run.run_id
        assert self.cell.rerun(run, reason) == current

    @rule(slot=st.sampled_from(list(WORKERS)), comes_back=st.booleans())
    def die(self, slot: str, comes_back: bool) -> None:
        self.cell.scripts.run(calls.dead(self.names[slot], silent_s=0))
        if comes_back:
            self.names[slot] = self.register(slot)

    @rule(request_id=st.sampled_from(REQUESTS))
    def cancel(self, request_id: str) -> None:
        before = self.cell.record(request_id).get("state")
        answer = self.cell.scripts.run(calls.finish(request_id, "cancelled"))
        assert answer == {None: "UNKNOWN", "done": "DONE"}.get(before, "FINISHED")

    @rule()
    def redis_restarts(self) -> None:
        """With fsync always nothing is lost."""
        self.server.kill()
        self.server.start()
        self.scripts.close()

    @invariant()
    def what_always_holds(self) -> None:
        self.logs_only_grow_and_end_once()
        self.books_balance()

    def logs_only_grow_and_end_once(self) -> None:
        for request_id, before in self.history.items():
            log = self.cell.log(request_id)
            tokens = [e.token for e in log if isinstance(e, TokenEntry)]
            assert tokens[: len(before)] == before, "I1"
            assert tokens == [token(request_id, k) for k in range(len(tokens))], "I1"
            assert request_id not in self.ended or tokens == before, "I5"
            ends = [i for i, e in enumerate(log) if isinstance(e, EndEntry)]
            assert ends in ([], [len(log) - 1]), "I5"
            assert bool(ends) == (self.cell.record(request_id)["state"] == "done"), "I5"
            self.history[request_id] = tokens
            if ends:
                self.ended.add(request_id)

    def books_balance(self) -> None:
        unfinished = {r for r in self.history if r not in self.ended}
        running = {m.decode() for m in self.cell.client.zrange(self.cell.keys.running, 0, -1)}  # pyright: ignore
        assert running == unfinished, "I2"
        delayed: list[bytes] = self.cell.client.zrange(self.cell.keys.delayed, 0, -1)  # pyright: ignore
        queued = self.cell.queued() + self.cell.queued("reruns") + [member.decode() for member in delayed]
        assert sorted(queued) == sorted(r for r in unfinished if self.cell.record(r)["state"] == "queued"), "I3"
        for name in self.names.values() if self.history else ():
            on = self.cell.requests_of_worker(name)
            for request_id in on:
                record = self.cell.record(request_id)
                assert record["state"] == "running" and name in record["route"].split(","), "I3"
            assert self.cell.reserved(name) == sum(int(self.cell.record(r)["pages_reserved"]) for r in on), "I4"
        for request_id in unfinished:
            record = self.cell.record(request_id)
            if record["state"] == "running":
                assert all(request_id in self.cell.requests_of_worker(w) for w in record["route"].split(",")), "I3"
        self.loads_are_sums(unfinished)
        self.results_are_sums(unfinished)

    def results_are_sums(self, unfinished: set[str]) -> None:
        client, keys = self.cell.client, self.cell.keys
        listed = {name.decode(): until for name, until in client.zrange(keys.results, 0, -1, withscores=True)}  # pyright: ignore
        books = {name.decode(): value.decode() for name, value in client.hgetall(keys.result_bytes).items()}  # pyright: ignore
        expected: Counter[str] = Counter()
        for request_id, until in listed.items():
            size, _, tenant = books.pop(request_id).partition(" ")
            expected.update({"": int(size), f" {tenant}": int(size)})
            assert (until == inf) == (request_id in unfinished), "I6"
        assert {name: int(value) for name, value in books.items()} == expected, "I6"
        for request_id in unfinished:
            assert ("result_bytes" in self.cell.record(request_id)) == (request_id in listed), "I6"

    def loads_are_sums(self, unfinished: set[str]) -> None:
        expected: Counter[str] = Counter()
        tenants: dict[str, set[str]] = {"": set(), "ada": set()}
        for request_id in unfinished:
            record = self.cell.record(request_id)
            expected[f"{record['state']}_rows"] += int(record["rows_to_compute"])
            expected[f"{record['state']}_tokens"] += max(0, int(record["max_tokens"]) - int(record["committed"]))
            expected["pages"] += int(record["pages_needed"])
            tenants[record["tenant"]].add(request_id)
            assert record["state"] == "running" or int(record["rows_to_compute"]) == int(record["prompt_tokens"]) + int(
                record["committed"]
            ), "I6"
        assert self.cell.outstanding() == +expected, "I6"
        accepted, ended = self.cell.totals()
        assert accepted - ended == len(unfinished), "the books: what was accepted has ended or has not"
        for tenant, requests in tenants.items():
            assert self.cell.requests_of_tenant(tenant) == requests, "I6"
        assert self.cell.due() <= set(self.cell.queued()), "I3"


def of_examples(count: int) -> settings:
    return settings(
        max_examples=count,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


TestScripts = ScriptMachine.TestCase
TestScripts.settings = of_examples(8)


@pytest.mark.thorough
class TestScriptsForLonger(TestScripts):
    """The same with three times as many examples: twenty seconds of CPU."""

    settings = of_examples(25)

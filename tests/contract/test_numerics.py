"""Workers of two numerics ids: a log continues under its own id while a worker serves it, then under another."""

from collections.abc import Callable

import pytest

from blockrelay.protocol.messages import Claimed, RequestBody
from blockrelay.protocol.transitions import calls
from tests.support.cell import MODEL, Cell, body

PATIENCE_S = 30.0
FAR = 1 << 46


class Fleet:
    """Whole-model workers by name; the id of each is its name's first letter."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        cell.agree(dead_after_s=3600)

    def add(self, *names: str, **more: object) -> None:
        for name in names:
            self.cell.worker(name, **{"split": "1-4", "numerics": name[0], **more})  # pyright: ignore[reportArgumentType]

    def start(self, request_id: str, worker_id: str, tokens: int = 2, **more: object) -> Claimed:
        """A request that `worker_id` has begun."""
        return self.cell.begin(worker_id, list(range(7, 7 + tokens)), request_id=request_id, **more)

    def claim(self, worker_id: str) -> list[Claimed]:
        return self.cell.claim(worker_id)

    def drain(self, worker_id: str) -> None:
        self.cell.scripts.run(calls.dead(worker_id, silent_s=0, reason="drain"))

    def left_by_a1(self, *others: str, tokens: int = 2, **more: object) -> None:
        """`a1` begins req-1 and leaves; `others` are there."""
        self.add("a1", *others)
        self.start("req-1", "a1", tokens, **more)
        self.drain("a1")

    def look(self, patience_s: float = PATIENCE_S) -> list[calls.Awaited]:
        return self.cell.scripts.run(calls.migrate(MODEL, patience_s=patience_s))

    def seconds_pass(self, seconds: float, numerics: str = "a", route_class: str = "cpu") -> None:
        """As if the last look had been so long ago."""
        field = f"{route_class}:{numerics}"
        absent, seen, most = self.cell.client.hget(self.cell.keys.numerics(MODEL), field).decode().split()  # pyright: ignore
        earlier = int(seen) - int(seconds * 1000)
        self.cell.client.hset(self.cell.keys.numerics(MODEL), field, f"{absent} {earlier} {most}")

    def let_go(self, numerics: str = "a") -> None:
        """Nobody of the id is left for as long as it takes."""
        self.look()
        while not any(found.freed for found in self.look()):
            self.seconds_pass(2.0, numerics)

    def fingerprint(self, request_id: str = "req-1") -> str:
        return self.cell.record(request_id)["numerics"]


@pytest.fixture
def fleet(cell: Cell) -> Fleet:
    return Fleet(cell)


class TestWhileOneLives:
    def test_the_re_run_is_left_to_it(self, cell: Cell, fleet: Fleet) -> None:
        fleet.left_by_a1("a2", "b1")
        assert fleet.claim("b1") == [] and cell.record()["state"] == "queued"
        assert [found.absent_s for found in fleet.look(patience_s=0)] == [None]
        assert fleet.claim("b1") == []
        (again,) = fleet.claim("a2")
        assert again.tokens == (7, 8) and fleet.fingerprint() == "a"

    def test_a_request_without_tokens_waits_for_nobody(self, cell: Cell, fleet: Fleet) -> None:
        fleet.left_by_a1("a2", "b1", tokens=0)
        (again,) = fleet.claim("b1")
        assert again.request_id == "req-1" and fleet.fingerprint() == "b"

    def test_nobody_behind_it_waits(self, cell: Cell, fleet: Fleet) -> None:
        """However many they are: 200 before a re-run and a first run that the other id may take."""
        fleet.add("a1", "a2", "b1")
        for i in range(200):
            fleet.start(f"old-{i}", "a1", need=1, limit=1000)
        fleet.drain("a1")
        fleet.start("req-b", "b1", limit=1000)
        fleet.cell.rerun(Claimed_of(cell, "req-b"), "restart")
        cell.accept("req-new", limit=1000)
        assert {run.request_id for run in fleet.claim("b1")} == {"req-b", "req-new"}

    def test_a_delayed_one_waits_too(self, cell: Cell, fleet: Fleet) -> None:
        fleet.add("a1", "a2", "b1")
        run = fleet.start("req-1", "a1")
        for _ in range(2):
            cell.rerun(run, "restart")
            cell.client.zadd(cell.keys.delayed, {"req-1": 1}, xx=True)
            assert fleet.claim("b1") == []
            (run,) = fleet.claim("a1")
        assert fleet.fingerprint() == "a"

    def test_its_deadline_ends_the_wait(self, cell: Cell, fleet: Fleet) -> None:
        fleet.left_by_a1("b1", deadline_ms=FAR)
        cell.client.hset(cell.keys.request("req-1"), "deadline_ms", 1)
        fleet.let_go()
        assert fleet.claim("b1") == []
        end = cell.end()
        assert end.reason == "expired" and cell.open_reruns() == []

    def test_cancelled_while_it_waits_it_leaves_nothing(self, cell: Cell, fleet: Fleet) -> None:
        fleet.left_by_a1("b1")
        assert cell.scripts.run(calls.finish("req-1", "cancelled")) == "FINISHED"
        assert cell.pinned("a") == [] and cell.outstanding() == {}
        assert fleet.look() == []
        keys = cell.keys
        assert not cell.client.exists(keys.pinned(MODEL, "cpu", "a"), keys.numerics(MODEL))


def Claimed_of(cell: Cell, request_id: str) -> Claimed:
    record = cell.record(request_id)
    return Claimed(
        request_id=request_id, run_id=record["run"], route=("",), route_class="cpu", waited_s=0, quarantined=False,
        packed=b"", tokens=(),
    )  # fmt: skip


class TestWhenNoneIsLeft:
    def test_it_goes_on_from_its_log_and_says_which_id_computed_what(self, cell: Cell, fleet: Fleet) -> None:
        fleet.left_by_a1("b1")
        assert fleet.claim("b1") == [], "nobody has seen yet that none is left"
        fleet.let_go()
        (again,) = fleet.claim("b1")
        assert again.tokens == (7, 8) and fleet.fingerprint() == "a+b@2"
        assert cell.commit(again, 2, [9], end="stop").verdict == "OK"
        end = cell.end()
        assert (end.reason, end.numerics) == ("stop", "a+b@2")
        events = [(e["event"], e.get("numerics_id"), e.get("tokens")) for e in cell.timeline()]
        assert ("rerun", "a", 2) in events and ("numerics_changed", "b", 2) in events

    def test_under_a_third_id_too(self, cell: Cell, fleet: Fleet) -> None:
        fleet.left_by_a1("b1")
        fleet.let_go()
        (again,) = fleet.claim("b1")
        cell.commit(again, 2, [9])
        fleet.add("c1")
        fleet.drain("b1")
        assert fleet.claim("c1") == [] and cell.pinned("b") == ["req-1"]
        fleet.let_go("b")
        assert fleet.claim("c1") and fleet.fingerprint() == "a+b@2+c@3"

    def test_without_tokens_in_between_an_id_leaves_no_trace_in_the_text(self, cell: Cell, fleet: Fleet) -> None:
        """It is named all the same: which of them computed which position stays true."""
        fleet.left_by_a1("b1")
        fleet.let_go()
        fleet.claim("b1")
        fleet.add("c1")
        fleet.drain("b1")
        fleet.let_go("b")
        assert fleet.claim("c1") and fleet.fingerprint() == "a+b@2+c@2"

    def test_one_that_comes_back_in_time_goes_on(self, cell: Cell, fleet: Fleet) -> None:
        fleet.left_by_a1("b1")
        fleet.look()
        for _ in range(13):
            fleet.seconds_pass(2.0)
            fleet.look()
        fleet.seconds_pass(2.0)
        (found,) = fleet.look()
        assert found.absent_s is not None and 28 <= found.absent_s < 30 and found.waiting == 1
        fleet.add("a2")
        assert fleet.look()[0].absent_s is None
        fleet.drain("a2")
        assert fleet.look()[0].absent_s == 0, "its time begins anew"
        fleet.add("a3")
        assert fleet.claim("b1") == [] and len(fleet.claim("a3")) == 1

    def test_one_that_comes_back_late_still_goes_first(self, cell: Cell, fleet: Fleet) -> None:
        """Let go, but nobody has taken it: whoever claims now sees that its own id lives again."""
        fleet.left_by_a1("b1")
        fleet.let_go()
        assert cell.open_reruns() == ["req-1"]
        fleet.add("a2")
        assert fleet.claim("b1") == [] and cell.pinned("a") == ["req-1"]
        assert fleet.claim("a2") and fleet.fingerprint() == "a"

    def test_a_draining_worker_and_a_silent_one_are_none(self, cell: Cell, fleet: Fleet) -> None:
        fleet.left_by_a1("a2", "a3", "b1")
        cell.client.hset(cell.keys.worker("a2"), "draining", 1)
        cell.client.zadd(cell.keys.workers, {"a3": 1})
        fleet.let_go()
        assert fleet.claim("b1") and fleet.fingerprint() == "a+b@2"

    def test_a_route_that_lacks_a_stage_serves_nobody(self, cell: Cell, fleet: Fleet) -> None:
        """The first stage lives and can do nothing: the request must not wait for it for ever."""
        for id_ in "ab":
            cell.worker(f"{id_}-first", stage=0, numerics=id_)
            cell.worker(f"{id_}-last", stage=1, numerics=id_)
        fleet.start("req-1", "a-first", tokens=1)
        fleet.drain("a-last")
        assert fleet.claim("a-first") == fleet.claim("b-first") == []
        fleet.let_go()
        (again,) = fleet.claim("b-first")
        assert again.route == ("b-first", "b-last") and fleet.fingerprint() == "a+b@1"

    def test_many_go_a_few_at_a_time_and_in_order(self, cell: Cell, fleet: Fleet) -> None:
        fleet.add("a1", "b1")
        for i in range(100):
            fleet.start(f"req-{i:03}", "a1", need=1, limit=1000)
        fleet.drain("a1")
        waiting = cell.pinned("a")
        fleet.let_go()
        assert fleet.look()[0].freed == 36 and fleet.look() == []
        assert cell.open_reruns() == waiting

    @pytest.mark.parametrize("away", ["Redis was away", "the clock went back", "the clock went ahead"])
    def test_a_time_in_which_nobody_looked_is_no_time_without_a_worker(
        self, cell: Cell, fleet: Fleet, away: str
    ) -> None:
        fleet.left_by_a1("b1")
        fleet.look()
        fleet.seconds_pass({"the clock went back": -3600.0}.get(away, 3600.0))
        (found,) = fleet.look()
        assert found.absent_s is not None and found.absent_s <= 2 and not found.freed


class TestPools:
    """A worker of the id lives whose pool could never hold the request: it is as good as none."""

    @pytest.fixture(autouse=True)
    def large_and_small(self, fleet: Fleet) -> None:
        fleet.add("a-large", pages=50)
        fleet.add("a-small", pages=10)
        fleet.add("b1", pages=50)
        fleet.start("req-1", "a-large", need=40)
        fleet.drain("a-large")

    def test_it_goes_on_under_another_id_after_the_wait(self, fleet: Fleet) -> None:
        assert [found.absent_s for found in fleet.look()] == [0]
        assert fleet.claim("a-small") == fleet.claim("b1") == [], "a larger one may come"
        fleet.let_go()
        assert fleet.claim("a-small") == []
        (again,) = fleet.claim("b1")
        assert again.tokens == (7, 8) and fleet.fingerprint() == "a+b@2"

    def test_what_the_small_one_holds_waits_for_it(self, cell: Cell, fleet: Fleet) -> None:
        fleet.add("a2", pages=20)
        fleet.start("req-2", "a2", need=2)
        fleet.drain("a2")
        assert [(found.waiting, found.absent_s) for found in fleet.look()] == [(1, None), (1, 0)]
        fleet.let_go()
        assert cell.pinned("a") == ["req-2"] and cell.open_reruns() == ["req-1"]
        assert [(found.waiting, found.absent_s) for found in fleet.look()] == [(1, None)]
        assert [run.request_id for run in fleet.claim("b1")] == ["req-1"]
        assert [run.request_id for run in fleet.claim("a-small")] == ["req-2"]

    def test_a_large_one_that_comes_in_time_goes_on(self, cell: Cell, fleet: Fleet) -> None:
        fleet.look()
        for _ in range(14):
            fleet.seconds_pass(2.0)
            fleet.look()
        fleet.add("a2", pages=40)
        assert fleet.look()[0].absent_s is None
        cell.client.hset(cell.keys.worker("a2"), "draining", 1)
        assert fleet.look()[0].absent_s == 0, "its time begins anew"
        cell.client.hdel(cell.keys.worker("a2"), "draining")
        assert fleet.claim("b1") == []
        assert fleet.claim("a2") and fleet.fingerprint() == "a"

    def test_one_that_comes_late_still_goes_first(self, cell: Cell, fleet: Fleet) -> None:
        fleet.let_go()
        fleet.add("a2", pages=40)
        assert fleet.claim("b1") == [] and cell.pinned("a") == ["req-1"]
        assert fleet.claim("a2") and fleet.fingerprint() == "a"

    def test_every_stage_of_a_route_must_hold_it(self, cell: Cell, fleet: Fleet) -> None:
        for name, stage, pages in (("c-first", 0, 50), ("c-last", 1, 50), ("c-more", 1, 10), ("d-first", 0, 50)):
            cell.worker(name, stage=stage, pages=pages, numerics=name[0])
        cell.worker("d-last", stage=1, pages=50, numerics="d")
        fleet.let_go()
        (run,) = fleet.claim("c-first")
        cell.commit(run, 2, [9])
        fleet.drain("c-last")
        assert fleet.claim("c-first") == fleet.claim("d-first") == []
        fleet.let_go("c")
        (again,) = fleet.claim("d-first")
        assert again.route == ("d-first", "d-last") and fleet.fingerprint() == "a+c@2+d@3"


class TestExact:
    def exact(self) -> RequestBody:
        plain = body()
        return RequestBody(prompt=plain.prompt, params=plain.params, exact=True)

    def test_it_ends_with_an_error_that_says_why(self, cell: Cell, fleet: Fleet) -> None:
        fleet.left_by_a1("b1", content=self.exact())
        assert fleet.claim("b1") == [] and cell.record()["state"] == "queued"
        fleet.let_go()
        assert fleet.claim("b1") == []
        end = cell.end()
        assert end.reason == "error" and end.meta["code"] == "numerics_changed"
        assert "under numerics id a" in end.meta["error"] and end.numerics == "a" and cell.outstanding() == {}

    def test_while_nobody_of_another_id_would_take_it_it_waits_on(self, cell: Cell, fleet: Fleet) -> None:
        """A fleet that is away for a minute is no upgrade."""
        fleet.add("a1")
        fleet.start("req-1", "a1", content=self.exact())
        fleet.drain("a1")
        fleet.let_go()
        fleet.add("a2")
        assert len(fleet.claim("a2")) == 1 and fleet.fingerprint() == "a"


def test_a_failed_gpu_hands_over_at_once_also_to_another_id(cell: Cell, fleet: Fleet) -> None:
    cell.scripts.run(calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class="gpu", plan="{}"))
    fleet.add("g1", device="gpu", varies=True)
    fleet.add("c1")
    run = fleet.start("req-1", "g1")
    assert cell.rerun(run, "gpu_error", block="block_1")
    assert len(fleet.claim("c1")) == 1 and fleet.fingerprint() == "g+c@2"


@pytest.mark.parametrize("what", ["look", "claim"])
def test_calling_it_twice_is_calling_it_once(cell: Cell, fleet: Fleet, what: str) -> None:
    fleet.left_by_a1("b1")
    fleet.let_go()
    if what == "claim":
        assert len(fleet.claim("b1")) == 1
    again: Callable[[], object] = (lambda: fleet.claim("b1")) if what == "claim" else fleet.look
    again()
    before = cell.everything()
    assert again() == [] and cell.everything() == before


def test_what_an_older_version_left_in_the_common_queue_is_sorted_in(cell: Cell, fleet: Fleet) -> None:
    fleet.left_by_a1("a2", "b1")
    key = cell.keys.pinned(MODEL, "cpu", "a")
    cell.client.delete(key)
    entry = cell.client.xadd(cell.keys.reruns(MODEL, "cpu"), {"request": "req-1"})
    cell.client.hset(cell.keys.request("req-1"), "job", f"reruns {entry.decode()}")  # pyright: ignore
    assert fleet.claim("b1") == [] and cell.pinned("a") == ["req-1"] and cell.open_reruns() == []

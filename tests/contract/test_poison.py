"""Requests that kill their workers: which requests are blamed, how long a re-run is delayed, and what is kept."""

import json

import pytest

from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.transitions import calls
from tests.support.cell import Cell


class Deaths:
    """Workers that come, claim what they get, and die of something."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.lives = cell, 0

    def worker(self) -> str:
        self.lives += 1
        return self.cell.worker(f"w{self.lives}", split="1-4")

    def claim(self) -> dict[str, calls.Claimed]:
        """What a new worker gets once every delay is over."""
        waiting: list[bytes] = self.cell.client.zrange(self.cell.keys.delayed, 0, -1)  # pyright: ignore
        if waiting:
            self.cell.client.zadd(self.cell.keys.delayed, dict.fromkeys(waiting, 1))
        return {run.request_id: run for run in self.cell.claim(self.worker())}

    def die(self, trying: str = "") -> None:
        """The last worker dies, while it tries a request or, at its arrival, somebody that CLAIM named."""
        if trying:
            self.cell.client.set(self.cell.keys.quarantine(f"w{self.lives}"), trying)
        self.cell.scripts.run(calls.dead(f"w{self.lives}", silent_s=0))

    def happen(self, times: int) -> None:
        """That many workers claim what there is, and die."""
        for _ in range(times):
            self.claim()
            self.die()

    def arrived(self) -> None:
        """The last worker has what it claimed and tries nobody."""
        self.cell.client.delete(self.cell.keys.quarantine(f"w{self.lives}"))


@pytest.fixture
def deaths(cell: Cell) -> Deaths:
    return Deaths(cell)


def test_after_three_deaths_it_is_tried_alone_and_after_five_alone_it_is_a_dead_letter(
    cell: Cell, deaths: Deaths
) -> None:
    cell.accept()
    solos: list[bool] = []
    while runs := deaths.claim():
        solos.append(runs["req-1"].quarantined)
        deaths.die()
    assert solos == [False] * 3 + [True] * 5, "CLAIM has named it, so each death while it arrived was its own"
    end = cell.end()
    assert end.reason == "error" and end.meta["code"] == "poison"
    ((_, letter),) = cell.client.xrange(cell.keys.dead_letters)  # pyright: ignore
    assert letter[b"request"] == b"req-1" and letter[b"reason"] == b"poison" and letter[b"committed"] == b"0"  # pyright: ignore
    assert RequestBody.decode(letter[b"body"]).prompt.tolist() == [1, 2, 3]  # pyright: ignore
    assert cell.client.zcard(cell.keys.delayed) == cell.client.zcard(cell.keys.running) == 0


def test_who_is_near_when_a_process_ends_that_its_worker_outlives_is_never_blamed(cell: Cell, deaths: Deaths) -> None:
    """The worker says by RERUN who was computed alone when the process ended that computes."""
    cell.accept("req-poison")
    cell.accept("req-mate")
    for _ in range(20):
        for request_id, run in deaths.claim().items():
            alone = request_id == "req-poison" and run.quarantined
            cell.scripts.run(calls.rerun(request_id, run.run_id, "death", alone=alone))
        deaths.arrived()
    end = cell.end("req-poison")
    assert end.meta["code"] == "poison" and not end.fallbacks
    assert cell.record("req-mate")["state"] == "queued" and cell.record("req-mate")["quarantine_deaths"] == "0"


def test_who_was_only_near_is_never_blamed(cell: Cell, deaths: Deaths) -> None:
    """A batch mate without progress dies with the poisonous one as often as it takes, and lives."""
    cell.accept("req-poison")
    cell.accept("req-mate")
    for _ in range(20):
        runs = deaths.claim()
        deaths.arrived()
        tried = runs.get("req-poison")
        deaths.die("req-poison" if tried and tried.quarantined else "")
    assert cell.record("req-poison")["state"] == "done"
    mate = cell.record("req-mate")
    assert (mate["state"], mate["quarantine_deaths"]) == ("queued", "0")
    runs = deaths.claim()
    assert cell.commit(runs["req-mate"], 0, [7], end="stop").verdict == "OK"


def test_a_death_while_nobody_was_tried_is_no_proof(cell: Cell, deaths: Deaths) -> None:
    """Somebody kills workers from outside: nothing accepted is lost to that."""
    cell.accept()
    for _ in range(20):
        assert deaths.claim()
        deaths.arrived()
        deaths.die()
    assert cell.record()["state"] == "queued"


def test_a_request_to_be_tried_alone_is_claimed_alone(cell: Cell, deaths: Deaths) -> None:
    cell.accept("req-1")
    cell.accept("req-2")
    deaths.happen(3)
    runs = deaths.claim()
    ((request_id, run),) = runs.items()
    assert run.quarantined and cell.client.get(cell.keys.quarantine(f"w{deaths.lives}")) == request_id.encode()
    assert cell.queued("reruns") == [({"req-1", "req-2"} - {request_id}).pop()]
    assert cell.record(request_id)["quarantined"] == "1"
    cell.accept("req-3")
    assert deaths.cell.claim(f"w{deaths.lives}").pop().quarantined, "the other one, before a first run"


def test_any_commit_starts_the_count_anew(cell: Cell, deaths: Deaths) -> None:
    cell.accept()
    deaths.happen(3)
    (run,) = deaths.claim().values()
    assert run.quarantined
    cell.commit(run, 0, [7])
    deaths.die()
    assert cell.record()["attempts"] == cell.record()["deaths"] == "1"
    (run,) = deaths.claim().values()
    assert not run.quarantined and cell.record()["quarantined"] == "0"


def test_a_run_that_ends_takes_its_name_back(cell: Cell, deaths: Deaths) -> None:
    cell.accept()
    deaths.happen(3)
    (run,) = deaths.claim().values()
    assert cell.rerun(run)
    assert not cell.client.exists(cell.keys.quarantine(f"w{deaths.lives}"))


class TestDelay:
    def waits_ms(self, cell: Cell) -> int:
        """Milliseconds that the request waits, from its re-run on; fails unless it does."""
        due = cell.client.zscore(cell.keys.delayed, "req-1")
        assert due is not None and cell.record()["job"] == "delayed" and not cell.queued("reruns")
        return int(due) - int(cell.record()["progress_ms"])  # pyright: ignore

    def wait_longer(self, cell: Cell) -> None:
        """As long as any re-run waits, nearly: the test may take its time."""
        cell.client.zadd(cell.keys.delayed, {"req-1": cell.now_ms() + 4900}, xx=True)

    def test_the_first_re_run_is_at_once_and_later_ones_wait_twice_as_long_each_time(
        self, cell: Cell, deaths: Deaths
    ) -> None:
        cell.accept()
        deaths.claim()
        deaths.die()
        assert cell.queued("reruns") == ["req-1"]
        waits: list[int] = []
        for _ in range(9):
            (run,) = deaths.claim().values()
            assert cell.rerun(run, "no_inbox")
            waits.append(self.waits_ms(cell))
        assert waits == [100, 200, 400, 800, 1600, 3200, 5000, 5000, 5000]

    def test_a_waiting_one_holds_nobody_back_and_is_claimed_when_it_is_due(self, cell: Cell, deaths: Deaths) -> None:
        cell.accept()
        deaths.happen(2)
        self.wait_longer(cell)
        cell.accept("req-2")
        assert [run.request_id for run in cell.claim(deaths.worker())] == ["req-2"]
        cell.client.zadd(cell.keys.delayed, {"req-1": 1})
        assert [run.request_id for run in cell.claim(deaths.worker())] == ["req-1"]

    def test_a_beat_queues_what_is_due_so_that_idle_workers_wake(self, cell: Cell, deaths: Deaths) -> None:
        cell.accept()
        deaths.happen(2)
        self.wait_longer(cell)
        worker_id = deaths.worker()
        cell.scripts.run(calls.heartbeat(worker_id))
        self.waits_ms(cell)
        cell.client.zadd(cell.keys.delayed, {"req-1": 1})
        cell.scripts.run(calls.heartbeat(worker_id))
        assert cell.queued("reruns") == ["req-1"] and not cell.client.zcard(cell.keys.delayed)

    def test_a_clock_that_went_back_makes_nobody_wait_for_hours(self, cell: Cell, deaths: Deaths) -> None:
        cell.accept()
        deaths.happen(2)
        cell.client.zadd(cell.keys.delayed, {"req-1": self.waits_ms(cell) + 10**14})
        assert [run.request_id for run in cell.claim(deaths.worker())] == ["req-1"]

    def test_cancelled_while_it_waits_it_is_gone(self, cell: Cell, deaths: Deaths) -> None:
        cell.accept()
        deaths.happen(2)
        assert cell.scripts.run(calls.finish("req-1", "cancelled")) == "FINISHED"
        assert not cell.client.exists(cell.keys.delayed) and not deaths.claim()

    def test_a_drain_neither_counts_nor_waits(self, cell: Cell, deaths: Deaths) -> None:
        cell.accept()
        for _ in range(4):
            assert deaths.claim()
            cell.scripts.run(calls.dead(f"w{deaths.lives}", silent_s=0, reason="drain"))
            assert cell.queued("reruns") == ["req-1"]
        assert cell.record()["attempts"] == "0"


@pytest.mark.parametrize(("code", "kept"), [("row_not_finite", 1), ("execution_error", 1), ("gone", 0)])
def test_what_cannot_be_computed_is_kept_too(cell: Cell, code: str, kept: int) -> None:
    cell.accept()
    cell.scripts.run(calls.finish("req-1", "error", meta={"code": code, "error": "a row became NaN"}))
    letters: list[tuple[bytes, dict[bytes, bytes]]] = cell.client.xrange(cell.keys.dead_letters)  # pyright: ignore
    assert len(letters) == kept
    for _, letter in letters:
        assert letter[b"reason"].decode() == code and letter[b"error"] == b"a row became NaN"
    end = cell.end()
    assert json.dumps(end.meta).count(code) == 1

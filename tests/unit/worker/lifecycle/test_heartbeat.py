"""The heartbeat: the pure comparison of runs, and the thread against a real Redis."""

import threading

from prometheus_client import CollectorRegistry

from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.messages import Ended
from blockrelay.protocol.transitions import calls
from blockrelay.redis.client import server_run_id
from blockrelay_worker.engine.mailbox import Event, Mailbox
from blockrelay_worker.lifecycle.heartbeat import Comparison, Heartbeat, compare
from blockrelay_worker.transport.events import Gone, Orphan, Restarted
from tests.support.cell import MODEL, Cell
from tests.support.waiting import wait_until
from tests.support.worker.links import links_of


def test_equal_tables_say_nothing() -> None:
    assert compare({"q": "r"}, {"q": "r"}, {"q": "r"}) == Comparison((), frozenset())


def test_a_run_that_redis_does_not_know_has_ended() -> None:
    assert compare({"q": "r"}, {"q": "r"}, {}).ended == (("q", "r"),)
    assert compare({"q": "old"}, {"q": "old"}, {"q": "new"}).ended == (("q", "old"),)


def test_a_run_that_only_redis_knows_is_strange() -> None:
    assert compare({}, {}, {"q": "r"}).strange == {("q", "r")}


def test_what_was_claimed_or_dropped_during_the_beat_is_neither() -> None:
    assert compare({}, {"q": "r"}, {"q": "r"}) == Comparison((), frozenset())
    assert compare({"q": "r"}, {}, {"q": "r"}) == Comparison((), frozenset())


class Beating:
    """A heartbeat thread on a cell, with the events in its mailbox."""

    def __init__(self, cell: Cell, run_id: str) -> None:
        self.cell = cell
        self.cell.worker("a", split="1-4")
        self.stop, self.mailbox, self.events = threading.Event(), Mailbox(), list[Event]()
        self.view: dict[str, str] = {}
        self.parts = 0
        metrics = WorkerMetrics(CollectorRegistry())
        links = links_of(cell, metrics=metrics, stop=self.stop)
        self.thread = Heartbeat(
            links,
            self.mailbox,
            worker_id="a",
            run_id=run_id,
            model=MODEL,
            split="1-4",
            stage=0,
            view=lambda: self.view,
            step_age=lambda: 0.0,
            parts=lambda: self.parts,
            pace=lambda: None,
            pages_used=lambda: 3,
            every_s=0.02,
            step_limit_s=lambda: 30.0,
            stop=self.stop,
        )
        self.thread.start()

    def wait_for(self, event: Event) -> None:
        def seen() -> bool:
            self.events += self.mailbox.take(0)
            return event in self.events

        wait_until(seen, f"{event} arrives", timeout_s=5)

    def end(self) -> None:
        self.stop.set()
        self.thread.join()


def test_a_lost_claim_reply_is_found_after_two_beats(cell: Cell) -> None:
    beating = Beating(cell, server_run_id(cell.client))
    beating.cell.accept()
    (run,) = beating.cell.claim("a")
    beating.wait_for(Orphan("req-1", run.run_id))
    beating.end()


def test_requests_of_a_step_that_goes_on_are_not_stuck(cell: Cell) -> None:
    beating = Beating(cell, server_run_id(cell.client))
    beating.cell.accept()
    (run,) = beating.cell.claim("a")
    beating.view = {"req-1": run.run_id}

    def moved_ms() -> float:
        return float(str(cell.client.zscore(cell.keys.running, "req-1")))

    cell.client.zadd(cell.keys.running, {"req-1": 1000})
    beating.parts += 1
    wait_until(lambda: moved_ms() > 1000, "a part is progress")
    cell.client.zadd(cell.keys.running, {"req-1": 1000})
    beats = float(str(cell.client.zscore(cell.keys.workers, "a")))
    wait_until(lambda: float(str(cell.client.zscore(cell.keys.workers, "a"))) > beats + 100, "it beats on")
    assert moved_ms() == 1000, "a beat alone is none"
    beating.end()


def test_a_run_that_ended_elsewhere_is_dropped(cell: Cell) -> None:
    beating = Beating(cell, server_run_id(cell.client))
    beating.view = {"req-9": "r"}
    beating.wait_for(Ended(request_id="req-9", run_id="r"))
    beating.end()


def test_another_redis_process_than_at_registration_is_a_restart(cell: Cell) -> None:
    beating = Beating(cell, "the process before")
    beating.wait_for(Restarted())
    beating.end()


def test_a_worker_that_was_declared_dead_learns_it(cell: Cell) -> None:
    beating = Beating(cell, server_run_id(cell.client))
    cell.scripts.run(calls.dead("a", silent_s=0))
    beating.wait_for(Gone("declared dead"))
    beating.thread.join(5)
    assert not beating.thread.is_alive()


def test_another_stage_in_the_plan_ends_this_life(cell: Cell) -> None:
    beating = Beating(cell, server_run_id(cell.client))
    plan = '{"epoch":1,"split":"1-2,3-4","route_class":"cpu","assignments":{"a":1},"blocks":{},"reasons":[]}'
    cell.scripts.run(calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class="cpu", plan=plan))
    beating.wait_for(Gone("the plan gives this worker another stage"))
    beating.end()

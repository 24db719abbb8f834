"""The heartbeat: the pure comparison of runs, and the thread against a real Redis."""

import threading
from collections.abc import Iterator

import pytest
import redis

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import Ended
from blockrelay.protocol.transitions import calls
from blockrelay.redis.client import Scripts, server_run_id
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.execution.page_layout import PageLayout
from blockrelay_worker.execution.page_pool import PagePool
from blockrelay_worker.kv.run_table import RunTable
from blockrelay_worker.lifecycle.changes.retirement import Retirement
from blockrelay_worker.lifecycle.changes.succession import Succession
from blockrelay_worker.lifecycle.heartbeat import Heartbeat, compare
from blockrelay_worker.transport.events import Event, Gone, Orphan, Restarted
from blockrelay_worker.transport.mailbox import Mailbox
from tests.support.cell import MODEL, Cell
from tests.support.waiting import wait_until
from tests.support.worker.links import links_of
from tests.support.worker.stage_role import stage_role


def test_equal_tables_say_nothing() -> None:
    assert compare({"q": "r"}, {"q": "r"}, {"q": "r"}) == ((), frozenset())


def test_a_run_that_redis_does_not_know_has_ended() -> None:
    assert compare({"q": "r"}, {"q": "r"}, {}) == ((("q", "r"),), frozenset())
    assert compare({"q": "old"}, {"q": "old"}, {"q": "new"}) == ((("q", "old"),), {("q", "new")})


def test_a_run_that_only_redis_knows_is_strange() -> None:
    assert compare({}, {}, {"q": "r", "not claimed": ""}) == ((), {("q", "r")})


def test_what_was_claimed_or_dropped_during_the_beat_is_neither() -> None:
    assert compare({}, {"q": "r"}, {"q": "r"}) == ((), frozenset())
    assert compare({"q": "r"}, {}, {"q": "r"}) == ((), frozenset())


class Beating:
    """A heartbeat thread on a cell, with the events in its mailbox."""

    def __init__(self, cell: Cell, role: StageRole, run_id: str) -> None:
        self.cell = cell
        self.cell.worker("a", split="1-4")
        self.stop, self.mailbox, self.events = threading.Event(), Mailbox[Event](), list[Event]()
        self.table = RunTable(PagePool(PageLayout(layers=1, kv_heads=1, head_dim=8), 3))
        self.links = links_of(cell, stop=self.stop)
        retirement = Retirement(self.links, MODEL, "a", split="1-4", folder=MODEL, numerics="n1")
        self.thread = Heartbeat(
            self.links,
            self.mailbox,
            role,
            self.table,
            run_id=run_id,
            model=MODEL,
            folder=MODEL,
            pace=lambda: None,
            blocks=lambda: None,
            every_s=0.02,
            step_limit_s=lambda: 30.0,
            stop=self.stop,
            memory=lambda: (70, 30),
            succession=Succession(self.links, MODEL, MODEL, retirement, lambda _: None),
        )
        self.thread.start()

    def wait_for(self, event: Event) -> None:
        def seen() -> bool:
            self.events += self.mailbox.take(0)
            return event in self.events

        wait_until(seen, f"{event} arrives", timeout_s=5)


@pytest.fixture
def known_run_id(client: redis.Redis) -> str:
    """The run id of the Redis process with which the worker has registered."""
    return server_run_id(client)


@pytest.fixture
def beating(cell: Cell, w8a8: BlockFolder, known_run_id: str) -> Iterator[Beating]:
    role = stage_role(w8a8, "a", split="1-4", stage=0, first=1, last=4)
    beating = Beating(cell, role, known_run_id)
    yield beating
    beating.stop.set()
    beating.thread.join()


def test_a_lost_claim_reply_is_found_after_two_beats(beating: Beating) -> None:
    beating.cell.accept()
    (run,) = beating.cell.claim("a")
    beating.wait_for(Orphan("req-1", run.run_id))


def test_requests_of_a_step_that_goes_on_are_not_stuck(client: redis.Redis, keys: Keys, beating: Beating) -> None:
    beating.cell.accept()
    (run,) = beating.cell.claim("a")
    beating.table.view = {"req-1": run.run_id}

    def moved_ms() -> float:
        return float(str(client.zscore(keys.running, "req-1")))

    client.zadd(keys.running, {"req-1": 1000})
    beating.links.clock.progressed()
    wait_until(lambda: moved_ms() > 1000, "a part is progress")
    client.zadd(keys.running, {"req-1": 1000})
    beats = float(str(client.zscore(keys.workers, "a")))
    wait_until(lambda: float(str(client.zscore(keys.workers, "a"))) > beats + 100, "it beats on")
    assert moved_ms() == 1000, "a beat alone is none"


def test_a_run_that_ended_elsewhere_is_dropped(beating: Beating) -> None:
    beating.table.view = {"req-9": "r"}
    beating.wait_for(Ended(request_id="req-9", run_id="r"))


@pytest.mark.parametrize("known_run_id", ["the process before"])
def test_another_redis_process_than_at_registration_is_a_restart(beating: Beating) -> None:
    beating.wait_for(Restarted())


def test_a_worker_that_was_declared_dead_learns_it(scripts: Scripts, beating: Beating) -> None:
    scripts.run(calls.dead("a", silent_s=0))
    beating.wait_for(Gone("declared dead"))
    beating.thread.join(5)
    assert not beating.thread.is_alive()


def test_another_stage_in_the_plan_ends_this_life(scripts: Scripts, beating: Beating) -> None:
    plan = '{"epoch":1,"split":"1-2,3-4","route_class":"cpu","assignments":{"a":1},"blocks":{},"reasons":[]}'
    scripts.run(calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class="cpu", plan=plan))
    beating.wait_for(Gone("the plan gives this worker another stage, and there is no room for both"))

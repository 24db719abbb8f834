"""The scheduler's loop against a real Redis, with workers simulated by the test."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from blockrelay.observability.metrics.scheduler import SchedulerMetrics
from blockrelay.protocol.capabilities import Pace
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.number import PROTOCOL
from blockrelay.protocol.plan import Device, Plan, Stage
from blockrelay.protocol.planned_split import PlannedSplit, equal_parts
from blockrelay.protocol.transitions import calls
from blockrelay.redis import client as redis_link
from blockrelay.redis.cell_settings import read_cell_settings
from blockrelay.redis.client import Scripts
from blockrelay.redis.plan_history import append, read_history
from blockrelay.redis.registry import read_plan
from blockrelay.settings import SchedulerSettings
from blockrelay_scheduler.link import SchedulerLinks
from blockrelay_scheduler.loop import Scheduler
from blockrelay_scheduler.policy import LOOK_LIMIT
from tests.support.cell import MODEL, Cell
from tests.support.plan_problems import costs
from tests.support.redis.redis_server import RedisServer
from tests.support.waiting import wait_until
from tests.support.worker.registering import enter


def scheduler(url: str, payload_url: str | None = None, **settings: object) -> Scheduler:
    """A scheduler of a model of 4 blocks in 2 stages that loses patience quickly."""
    options: dict[str, object] = {"stages": 2, "cell": "t", "dead_after_s": 0.4, "tick_s": 0.02, **settings}
    client, keys = redis_link.connect(url), Keys("t")
    payload = redis_link.connect(payload_url) if payload_url else client
    link = SchedulerLinks(client, payload, keys, Scripts(client, keys))
    checked = SchedulerSettings.model_validate(options)
    return Scheduler(
        settings=checked,
        link=link,
        metrics=SchedulerMetrics(CollectorRegistry()),
        model=MODEL,
        planned=equal_parts(4, checked.stages),
        costs=costs(4),
    )


@contextmanager
def running(*schedulers: Scheduler) -> Iterator[None]:
    """Each in a thread of its own, until the end of the block."""
    stop = threading.Event()
    threads = [threading.Thread(target=s.run, args=(stop,)) for s in schedulers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)
        for s in schedulers:
            s.link.client.close()
            s.link.payload.close()
    assert not any(thread.is_alive() for thread in threads)


def register(cell: Cell, name: str, *, device: Device = "cpu", registered: int = 1) -> None:
    """A worker that has registered and waits for a stage."""
    enter(cell.client, cell.keys, name, model=MODEL, numerics="n1", device=device)
    cell.client.hset(cell.keys.worker(name), "registered_ms", registered)


def test_more_workers_than_a_pipeline_is_long_are_all_seen(
    cell: Cell, own_redis: RedisServer, redis_server: RedisServer
) -> None:
    """Who was not among the first of them was taken for gone, and its inbox deleted."""
    names = [f"w{i}" for i in range(600)]
    for name in names:
        register(cell, name)
    payload = own_redis.client()
    for name in names:
        payload.xadd(cell.keys.inbox(name), {"rows": b"rows"})
    one = scheduler(redis_server.url, own_redis.url, stages=1, dead_after_s=60)
    with running(one):
        wait_until(lambda: len(assignments(cell)) == len(names), "all are seen")
        for name in names[:300]:
            beat(cell, name)
        cell.client.zrem(cell.keys.workers, "w0")
        cell.client.delete(cell.keys.worker("w1"))
        wait_until(lambda: not payload.exists(cell.keys.inbox("w1")), "who has no record is swept")
    assert sum(payload.exists(cell.keys.inbox(name)) for name in names) == 599  # pyright: ignore
    payload.close()
    beat(cell, "w0")


def beat(cell: Cell, name: str) -> None:
    seconds, micros = cell.client.time()  # pyright: ignore[reportGeneralTypeIssues]
    cell.client.zadd(cell.keys.workers, {name: int(seconds) * 1000 + int(micros) // 1000})


def plan_of(cell: Cell) -> Plan | None:
    return read_plan(cell.client, cell.keys, MODEL)


def assignments(cell: Cell) -> dict[str, int]:
    plan = plan_of(cell)
    return dict(plan.assignments) if plan else {}


def metric(s: Scheduler, name: str, **labels: str) -> float:
    return s.metrics.registry.get_sample_value(name, labels) or 0.0


def state(s: Scheduler, name: str) -> bool:
    return metric(s, "blockrelay_state", machine="scheduler", state=name) == 1


def test_workers_get_stages_and_the_requests_of_a_dead_one_run_again(cell: Cell, redis_server: RedisServer) -> None:
    one = scheduler(redis_server.url)
    with running(one):
        wait_until(lambda: state(one, "waiting"), "it waits for workers")
        register(cell, "a", registered=1)
        register(cell, "b", registered=2)
        wait_until(lambda: (beat(cell, "a"), beat(cell, "b"), state(one, "idle"))[2], "none is missing")
        wait_until(
            lambda: (beat(cell, "a"), beat(cell, "b"), assignments(cell) == {"a": 0, "b": 1})[2], "both are placed"
        )
        cell.worker("a", stage=0)
        cell.worker("b", stage=1)
        run = cell.begin("a")
        assert run.route == ("a", "b")
        wait_until(lambda: (beat(cell, "a"), cell.record()["state"] == "queued")[1], "the run ends with its worker")
        assert cell.queued("reruns") == ["req-1"] and cell.record()["rerun_reason"] == "death"
        wait_until(lambda: (beat(cell, "a"), assignments(cell) == {"a": 0})[1], "the dead worker leaves the plan")
        plan = plan_of(cell)
        assert plan is not None and plan.split == "1-2,3-4", "a death changes no split"
        assert one.gaps() == []
        told = "blockrelay_queue_depth"
        wait_until(lambda: (beat(cell, "a"), metric(one, told, stream="reruns:cpu") == 1)[1], "the queue is told")
    assert metric(one, "blockrelay_worker_deaths_total") == 1
    assert metric(one, "blockrelay_reruns_total", reason="death") == 1
    assert metric(one, "blockrelay_requests_in_flight") == 1


def test_the_scheduler_tells_the_books_and_what_is_called_for(cell: Cell, redis_server: RedisServer) -> None:
    one = scheduler(redis_server.url, stages=1, dead_after_s=60, target_backlog_s=1)
    cell.worker("a", split="1-4")
    cell.scripts.run(calls.heartbeat("a", Pace(row_s=0.1, steps={1: 0.2})))
    for request in ("req-1", "req-2", "req-3"):
        cell.accept(request)
    cell.scripts.run(calls.finish("req-3", "cancelled"))
    with running(one):
        wait_until(lambda: metric(one, "blockrelay_accepted_total") == 3, "the books are told")
        assert metric(one, "blockrelay_ended_total", reason="cancelled") == 1
        assert metric(one, "blockrelay_requests_in_flight") == 2, "what was accepted has ended, or is in flight"
        wait_until(lambda: metric(one, "blockrelay_oldest_waiting_seconds") > 1, "nobody moves")
        work = cell.outstanding()
        seconds = 0.1 * work["queued_rows"] + 0.2 * work["queued_tokens"]
        assert metric(one, "blockrelay_backlog_seconds") == pytest.approx(seconds)
        assert metric(one, "blockrelay_workers_wanted", device="cpu") == 2, "no more than requests"
        for request in ("req-1", "req-2"):
            cell.scripts.run(calls.finish(request, "cancelled"))
        wait_until(lambda: metric(one, "blockrelay_workers_wanted", device="cpu") == 0, "nothing is left to do")
    assert metric(one, "blockrelay_oldest_waiting_seconds") == metric(one, "blockrelay_backlog_seconds") == 0
    assert metric(one, "blockrelay_dead_letters") == 0


def test_two_schedulers_agree_and_count_every_death_once(cell: Cell, redis_server: RedisServer) -> None:
    pair = scheduler(redis_server.url), scheduler(redis_server.url)
    epochs: list[int] = []
    with running(*pair):
        for count, name in enumerate(("a", "b", "c", "d"), 1):
            register(cell, name, registered=count)

            def everybody_is_placed(placed: int = count) -> bool:
                for each in ("a", "b", "c", "d")[:placed]:
                    beat(cell, each)
                return len(assignments(cell)) == placed

            wait_until(everybody_is_placed, f"{count} are placed")
            plan = plan_of(cell)
            assert plan is not None
            epochs.append(plan.epoch)
        assert assignments(cell) == {"a": 0, "b": 1, "c": 0, "d": 1}
        wait_until(lambda: not assignments(cell), "all of them fall silent and leave")
        for each in pair:
            wait_until(lambda s=each: metric(s, "blockrelay_worker_deaths_total") == 4, "each tells of all")
    assert epochs == list(range(epochs[0], epochs[0] + 4)), "one epoch for each arrival"
    assert cell.client.zcard(cell.keys.workers) == 0


def test_a_worker_without_a_record_is_cleaned_away(cell: Cell, redis_server: RedisServer) -> None:
    with running(scheduler(redis_server.url)):
        beat(cell, "ghost")
        wait_until(lambda: not cell.client.zcard(cell.keys.workers), "the ghost is gone")


def test_rows_for_a_dead_worker_leave_the_payload_redis(
    cell: Cell, redis_server: RedisServer, own_redis: RedisServer
) -> None:
    payload = own_redis.client()
    with running(scheduler(redis_server.url, own_redis.url)):
        for name in ("killed", "reported"):
            cell.worker(name, stage=0)
            payload.xadd(cell.keys.inbox(name), {"rows": b"rows"})
        wait_until(
            lambda: (beat(cell, "killed"), beat(cell, "reported"), len(assignments(cell)) == 2)[2], "both are seen"
        )
        cell.client.delete(cell.keys.worker("reported"), cell.keys.inbox("reported"))  # as DEAD by somebody else does
        cell.client.zrem(cell.keys.workers, "reported")
        wait_until(lambda: not payload.exists(cell.keys.inbox("killed"), cell.keys.inbox("reported")), "both are empty")
    payload.close()


def test_a_payload_redis_that_sleeps_delays_nobody(
    cell: Cell, redis_server: RedisServer, own_redis: RedisServer
) -> None:
    """A round as long as a call that nobody answers would look to the loop like a control Redis that stood still."""
    assert own_redis.process is not None
    with running(scheduler(redis_server.url, own_redis.url)):
        for name in ("first", "second"):
            cell.worker(name, stage=0)
        wait_until(lambda: (beat(cell, "first"), beat(cell, "second"), len(assignments(cell)) == 2)[2], "both are seen")
        os.kill(own_redis.process.pid, signal.SIGSTOP)
        try:
            wait_until(
                lambda: (beat(cell, "second"), "first" not in assignments(cell))[1], "the first is declared dead"
            )
            wait_until(lambda: not assignments(cell), "and later the second", timeout_s=4)
        finally:
            os.kill(own_redis.process.pid, signal.SIGCONT)


def test_a_stalled_run_is_run_again_and_an_overdue_request_ends(cell: Cell, redis_server: RedisServer) -> None:
    cell.worker("a", stage=0, split="1-4")
    cell.accept("req-stuck")
    assert len(cell.claim("a")) == 1
    cell.accept("req-late", deadline_ms=1)
    impatient = scheduler(redis_server.url, stages=1, dead_after_s=60, stalled_after_s=0.5, prompt_tokens_per_s=1000)
    with running(impatient):
        wait_until(lambda: cell.record("req-stuck")["state"] == "queued", "the stuck run is ended")
        wait_until(lambda: cell.record("req-late")["state"] == "done", "the late request is ended")
    assert cell.record("req-stuck")["rerun_reason"] == "stalled" and cell.record("req-late")["end"] == "expired"


def test_a_stuck_run_is_found_behind_any_number_of_requests_that_wait(cell: Cell, redis_server: RedisServer) -> None:
    cell.worker("a", stage=0, split="1-4")
    cell.accept("req-stuck")
    assert len(cell.claim("a")) == 1
    cell.accept("req-late", deadline_ms=1)
    for i in range(3 * LOOK_LIMIT):
        cell.client.hset(cell.keys.request(f"req-{i}"), "state", "queued")
    cell.client.zadd(cell.keys.running, {f"req-{i}": 1 for i in range(3 * LOOK_LIMIT)})
    impatient = scheduler(redis_server.url, stages=1, dead_after_s=60, stalled_after_s=0.5, prompt_tokens_per_s=1000)
    with running(impatient):
        wait_until(lambda: cell.record("req-stuck")["state"] == "queued", "the stuck run is ended")
        wait_until(lambda: cell.record("req-late")["state"] == "done", "the late request is ended")


def test_the_scheduler_that_began_last_decides_what_holds_for_the_cell(
    cell: Cell, redis_server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def in_force() -> tuple[int, int] | None:
        found = read_cell_settings(cell.client, cell.keys)
        return found and (found.retention_s, found.dead_after_ms)

    lines: list[str] = []

    def said() -> list[str]:
        lines.append(capsys.readouterr().out)
        return lines

    follows = "retention_s is 88 in this cell, not 77"
    first = scheduler(redis_server.url, retention_s=77, dead_after_s=5)
    second = scheduler(redis_server.url, retention_s=88, dead_after_s=5)
    with running(first):
        wait_until(lambda: in_force() == (77, 5000), "it has said them")
        with running(second):
            wait_until(lambda: in_force() == (88, 5000), "the other one has said its own")
            wait_until(lambda: follows in "".join(said()), "the first one says that it follows")
        cell.client.flushall()
        wait_until(lambda: in_force() == (88, 5000), "who is left has said them again")


def test_redis_goes_away_and_comes_back_and_nobody_is_declared_dead_for_it(own_redis: RedisServer) -> None:
    client, keys = own_redis.client(), Keys("t")
    cell = Cell(client, keys, Scripts(client, keys))
    one = scheduler(own_redis.url, dead_after_s=1.0)
    with running(one):
        cell.worker("a", stage=0)
        wait_until(lambda: (beat(cell, "a"), assignments(cell) == {"a": 0})[1], "it is placed")
        own_redis.kill()
        killed = time.monotonic()
        wait_until(lambda: "Redis does not answer" in "".join(one.gaps()), "the scheduler says that Redis is away")
        wait_until(lambda: state(one, "error"), "it is in the state for that")
        wait_until(lambda: time.monotonic() > killed + 1.1, "the beat on disk is older than dead_after_s")
        own_redis.start()
        wait_until(lambda: one.gaps() == [], "the scheduler is back")
        beat(cell, "a")
        register(cell, "b", registered=5)
        wait_until(lambda: (beat(cell, "a"), assignments(cell) == {"a": 0, "b": 1})[1], "it goes on planning")
    assert metric(one, "blockrelay_worker_deaths_total") == 0
    assert metric(one, "blockrelay_redis_errors_total") >= 1
    client.close()


def test_a_cell_that_loses_its_number_while_a_worker_dies_is_given_it_again(
    cell: Cell, redis_server: RedisServer
) -> None:
    """DEAD, which comes first in a round, is refused until then."""
    one = scheduler(redis_server.url)
    with running(one):
        wait_until(lambda: one.gaps() == [], "it runs")
        together = cell.client.pipeline(transaction=True)
        together.delete(cell.keys.protocol)
        together.hset(cell.keys.worker("a"), "model", MODEL)
        together.zadd(cell.keys.workers, {"a": 1})
        together.execute()
        wait_until(lambda: cell.client.get(cell.keys.protocol) == b"%d" % PROTOCOL, "it has its number again")
        wait_until(lambda: not cell.client.zcard(cell.keys.workers), "the silent worker is dead")
    cell.client.delete(cell.keys.protocol)


def test_redis_stands_still_and_nobody_is_declared_dead_for_it(own_redis: RedisServer) -> None:
    client, keys = own_redis.client(), Keys("t")
    cell = Cell(client, keys, Scripts(client, keys))
    one = scheduler(own_redis.url, dead_after_s=1.0)
    with running(one):
        cell.worker("a", stage=0)
        wait_until(lambda: (beat(cell, "a"), one.gaps() == [])[1], "it runs")
        wait_until(lambda: (beat(cell, "a"), time.monotonic() > one.liveness.trusted_from)[1], "silence counts")
        trusted = one.liveness.trusted_from
        assert own_redis.process is not None
        own_redis.process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        wait_until(lambda: time.monotonic() > stopped + 1.5, "the last beat is older than dead_after_s")
        own_redis.process.send_signal(signal.SIGCONT)
        wait_until(lambda: one.liveness.trusted_from > trusted, "the scheduler notices")
        beat(cell, "a")
        assert metric(one, "blockrelay_worker_deaths_total") == 0
        wait_until(lambda: metric(one, "blockrelay_worker_deaths_total") == 1, "true silence is still noticed")
    client.close()


def test_schedulers_that_were_told_different_numbers_of_stages_settle_on_the_later_one(
    cell: Cell, redis_server: RedisServer
) -> None:
    first, last = scheduler(redis_server.url), scheduler(redis_server.url, stages=4)
    for each in (first, last):
        each.tick()
    plan = plan_of(cell)
    assert plan is not None and plan.split == "1-1,2-2,3-3,4-4"
    for each in (first, last, first, last):
        each.tick()
    assert plan_of(cell) == plan
    again = scheduler(redis_server.url)
    for each in (again, first, last, again, first, last):
        each.tick()
    settled = plan_of(cell)
    assert settled is not None and (settled.split, settled.epoch) == ("1-2,3-4", plan.epoch + 1)
    for each in (first, last, again):
        each.link.client.close()


def stages_told(one: Scheduler) -> set[tuple[str, str]]:
    """Of the metrics: number and blocks of each stage."""
    samples = [sample for family in one.metrics.registry.collect() for sample in family.samples]
    told = [sample.labels for sample in samples if sample.name == "blockrelay_stage_workers"]
    return {(labels["stage"], labels["blocks"]) for labels in told}


def test_a_plan_that_somebody_applies_is_told_by_log_and_metrics(cell: Cell, redis_server: RedisServer) -> None:
    one = scheduler(redis_server.url)
    with capture_logs() as said:
        register(cell, "a", registered=1)
        one.tick()
        behind = read_history(cell.client, cell.keys, MODEL)[0].id
        uneven = PlannedSplit(
            stages=(Stage(first=1, last=3), Stage(first=4, last=4)), reasons=("", ""), devices=((), ())
        )
        assert append(cell.client, cell.keys, MODEL, uneven, origin="apply", who="ada@host", behind=behind)
        one.tick()
        wait_until(lambda: (one.tick(), stages_told(one))[1] == {("0", "1-3"), ("1", "4-4")}, "metrics tell of it too")
    told = [(entry["event"], entry["split"], entry["source"]) for entry in said if entry["event"].startswith("PLAN_")]
    assert [event for event, *plan in told if plan == ["1-3,4-4", "applied by ada@host"]][:2] == [
        "PLAN_CHANGED",
        "PLAN_IN_FORCE",
    ]
    one.link.client.close()

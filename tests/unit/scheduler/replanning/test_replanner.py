"""Two schedulers correct one record, and move borders once; on a real Redis, with workers that the test plays."""

import json

import pytest
import redis
from prometheus_client import CollectorRegistry

from blockrelay.observability.metrics.scheduler import SchedulerMetrics
from blockrelay.protocol.block_times import BlockTimes
from blockrelay.protocol.plan import Plan
from blockrelay.protocol.planned_split import equal_parts
from blockrelay.protocol.transitions import calls
from blockrelay.redis import plan_history
from blockrelay.redis.plan_history import Origin, PlanEntry
from blockrelay.redis.registry import read_workers
from blockrelay.settings import SchedulerSettings
from blockrelay_scheduler.link import SchedulerLinks
from blockrelay_scheduler.replanning import measured_profile, replanner
from blockrelay_scheduler.replanning.measured_profile import MeasuredProfile
from blockrelay_scheduler.replanning.replanner import Replanner
from tests.support.cell import MODEL, Cell
from tests.support.plan_problems import costs

SPLIT = "1-4,5-8"
PLAN = Plan(epoch=1, split=SPLIT, route_class="cpu", assignments={}, blocks={}, reasons=())


class Watching:
    """A scheduler's replanner on a cell with two workers of four blocks each, the second of which has a request."""

    def __init__(self, cell: Cell, name: str = "one", **settings: object) -> None:
        self.cell = cell
        link = SchedulerLinks(cell.client, cell.client, cell.keys, cell.scripts)
        options = SchedulerSettings.model_validate({"replan_after_s": 60, "replan_every_s": 600, **settings})
        self.metrics = SchedulerMetrics(CollectorRegistry())
        self.replanner = Replanner(link, MODEL, costs(8), lambda _: None, options, self.metrics, name)

    def look(self) -> list[str]:
        """The stages in the plan history after a look, newest first."""
        entry = plan_history.read_history(self.cell.client, self.cell.keys, MODEL)[0]
        self.replanner.look(read_workers(self.cell.client, self.cell.keys, MODEL), PLAN, entry)
        return [one.planned.text for one in plan_history.read_history(self.cell.client, self.cell.keys, MODEL)]

    def gauge(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


@pytest.fixture
def running(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> Cell:
    """The second worker is twice as slow as the first one; both are on one machine."""
    monkeypatch.setattr(replanner, "REPLAN_LOOK_S", 0.0)
    for stage, name in enumerate(("h:1:a", "h:2:b")):
        cell.worker(name, split=SPLIT, stage=stage, loads_beside=True)
    measure(cell, "h:1:a", 1, 0.001)
    measure(cell, "h:2:b", 5, 0.002)
    enter(cell, "settings")
    cell.begin("h:1:a")
    return cell


def measure(cell: Cell, worker: str, first: int, seconds: float) -> None:
    """A heartbeat of a worker with four blocks that took `seconds` each."""
    times = BlockTimes(first=first, seconds=(seconds,) * 4, rows=2.0, context=50.0, free_bytes=1 << 30)
    assert cell.scripts.run(calls.heartbeat(worker, block_times=times.to_json())) is not None


def enter(cell: Cell, origin: Origin) -> PlanEntry:
    history = plan_history.read_history(cell.client, cell.keys, MODEL)
    behind = history[0].id if history else ""
    entry = plan_history.append(
        cell.client, cell.keys, MODEL, equal_parts(8, 2), origin=origin, who="a test", behind=behind
    )
    assert entry is not None
    return entry


def record(cell: Cell) -> MeasuredProfile:
    found = measured_profile.decode(cell.client.get(cell.keys.measured_profile(MODEL)))  # pyright: ignore[reportArgumentType]
    assert found is not None
    return found


def minutes_pass(cell: Cell) -> None:
    """What has been better is so for long."""
    before, key = record(cell), cell.keys.measured_profile(MODEL)
    fields = json.loads(before.to_json())
    for name in ("better_since_ms", "replanned_ms"):
        fields[name] = fields[name] and fields[name] - 10 * 60_000
    cell.client.set(key, json.dumps(fields))


def test_borders_move_when_it_has_paid_for_long_enough_and_not_again_soon(running: Cell) -> None:
    one = Watching(running)
    assert one.look() == [SPLIT] and record(running).better_since_ms is not None
    assert record(running).processes["h:2"] == pytest.approx(2 * record(running).processes["h:1"], rel=0.01)
    since = record(running).better_since_ms
    assert one.look() == [SPLIT] and record(running).better_since_ms == since, "it has not been better for long"
    minutes_pass(running)
    assert one.look() == ["1-7,8-8", SPLIT]
    entry = plan_history.read_history(running.client, running.keys, MODEL)[0]
    assert entry.source == "measured by one"
    assert "instead of" in entry.planned.reasons[0] and "2.0 times as slow as the fastest" in entry.planned.reasons[1]
    assert record(running).replanned_ms is not None and record(running).better_since_ms is None
    enter(running, "apply")  # the same stages again, so that they are worse again
    one.look()
    assert (one.gauge("blockrelay_plan_gain_ratio") or 0) > 0.15 and record(running).better_since_ms is not None
    fields = json.loads(record(running).to_json())
    fields["better_since_ms"] -= 10 * 60_000
    running.client.set(running.keys.measured_profile(MODEL), json.dumps(fields))
    assert one.look()[0] == SPLIT, "the last change was less than ten minutes ago"
    minutes_pass(running)
    assert one.look()[0] == "1-7,8-8"


def test_two_schedulers_move_borders_once(running: Cell) -> None:
    one, two = Watching(running), Watching(running, "two")
    for each in (one, two):
        each.look()
    minutes_pass(running)
    seen = read_workers(running.client, running.keys, MODEL)
    entry = plan_history.read_history(running.client, running.keys, MODEL)[0]
    for each in (one, two):
        each.replanner.look(seen, PLAN, entry)
    history = plan_history.read_history(running.client, running.keys, MODEL)
    assert [found.planned.text for found in history] == ["1-7,8-8", SPLIT]


def test_gauges_show_the_times_of_both(running: Cell) -> None:
    one = Watching(running)
    one.look()
    observed = [one.gauge("blockrelay_plan_observed_seconds", block=f"block_{n}", device="cpu") for n in (1, 8)]
    assert observed == [0.001, 0.002]
    predicted = [one.gauge("blockrelay_plan_predicted_seconds", block=f"block_{n}", device="cpu") for n in (1, 8)]
    assert predicted[0] == predicted[1] and predicted[0]


@pytest.mark.parametrize(
    "why",
    ["off", "rolled back", "nothing to do", "one has no times", "one moves", "another plan is newer", "not enough"],
)
def test_borders_stay(running: Cell, client: redis.Redis, why: str) -> None:
    one = Watching(running, replan="off" if why == "off" else "on", replan_gain=0.9 if why == "not enough" else 0.15)
    match why:
        case "rolled back":
            enter(running, "rollback")
        case "nothing to do":
            running.scripts.run(calls.finish("req-1", "cancelled"))
        case "one has no times":
            client.hdel(running.keys.worker("h:1:a"), "block_times")
        case "one moves":
            running.worker("h:1:c", split="1-5,6-8", stage=0, succeeds="h:1:a")
        case "another plan is newer":
            entry = plan_history.read_history(client, running.keys, MODEL)[0]
            plan_history.append(
                client, running.keys, MODEL, equal_parts(8, 1), origin="apply", who="a test", behind=entry.id
            )
        case _:
            pass
    before = one.look()
    if client.get(running.keys.measured_profile(MODEL)) is not None:
        assert record(running).better_since_ms is None
        minutes_pass(running)
    assert one.look() == before


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"processes": {"a": -1}, "blocks": {}}', b"\xff"])
def test_a_damaged_record_is_measured_again(running: Cell, client: redis.Redis, content: bytes) -> None:
    client.set(running.keys.measured_profile(MODEL), content)
    assert measured_profile.decode(content) is None
    Watching(running).look()
    assert set(record(running).processes) == {"h:1", "h:2"}


def test_a_key_of_another_type_is_removed_and_measured_again(running: Cell, client: redis.Redis) -> None:
    key = running.keys.measured_profile(MODEL)
    client.hset(key, "a", "b")
    Watching(running).look()
    assert set(record(running).processes) == {"h:1", "h:2"}


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"first": 1}', b'{"first":1,"seconds":["a"],"rows":1}'])
def test_times_that_cannot_be_read_are_none(running: Cell, client: redis.Redis, content: bytes) -> None:
    client.hset(running.keys.worker("h:1:a"), "block_times", content)  # pyright: ignore[reportArgumentType]
    (first, _) = read_workers(client, running.keys, MODEL)
    assert first.block_times is None
    Watching(running).look()

"""How much slower CPUs are than the GPUs of a stage: from a profile, from measurements, and when that is published."""

import json
from dataclasses import replace
from typing import Any

import pytest

from blockrelay.planning.profile import BlockProfile, Profile
from blockrelay.protocol.block_times import BlockTimes
from blockrelay.protocol.plan import Device, WorkerInfo, parse_split
from blockrelay.protocol.transitions import calls
from blockrelay_scheduler.link import SchedulerLinks
from blockrelay_scheduler.planning.cost_model import CostModel
from blockrelay_scheduler.replanning.measured_profile import MeasuredProfile
from blockrelay_scheduler.replanning.slowdowns import SlowdownPublisher, is_news, slowdowns
from tests.support.cell import MODEL, Cell
from tests.support.plan_problems import analysis

SPLIT = "1-2,3-4"
#: A millisecond on a GPU and three on a CPU, and half of that more for each further row on a CPU.
PROFILED = CostModel(
    analysis(4),
    ("w8a8",) * 4,
    Profile(
        blocks={
            f"block_{n}": {
                "GPU": BlockProfile(seconds={1: 1e-3, 2: 1e-3}),
                "CPU": BlockProfile(seconds={1: 3e-3, 2: 4.5e-3}),
            }
            for n in range(1, 5)
        }
    ),
)
UNPROFILED = CostModel(analysis(4), ("w8a8",) * 4)
NOTHING = MeasuredProfile()


def worker(
    stage: int, device: Device, ms: float | None = None, *, pid: int = 0, rows: float = 1.0, **more: object
) -> WorkerInfo:
    """A worker whose blocks took `ms` milliseconds each in steps of `rows`; None: it has not measured them."""
    at = parse_split(SPLIT)[stage]
    times = None
    if ms is not None:
        seconds = (ms * 1e-3,) * (at.last - at.first + 1)
        times = BlockTimes(first=at.first, seconds=seconds, rows=rows, context=128.0, free_bytes=0)
    pid = pid or (100 if device == "cpu" else 200) + stage
    fields: dict[str, object] = {"ready": True, "block_times": times, **more}
    return WorkerInfo(
        id=f"h:{pid}:abc", model="m", device=device, numerics="n", host="h", pid=pid, port=0, registered_ms=0,
        split=SPLIT, stage=stage, first=at.first, last=at.last, **fields,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip


def test_a_profile_says_it_without_measurements() -> None:
    both = [worker(0, "gpu"), worker(0, "cpu"), worker(1, "cpu")]
    assert slowdowns(PROFILED, both, NOTHING) == {"1-2": 3.0}, "the second stage has no GPU"


def test_what_the_system_has_measured_corrects_the_profile() -> None:
    both = [worker(0, "gpu"), worker(0, "cpu")]
    measured = MeasuredProfile(processes={"h:100": 2.0, "h:200": 0.5}, blocks={1: 3.0})
    assert slowdowns(PROFILED, both, measured) == {"1-2": 12.0}


def test_measured_times_of_a_live_worker_are_better_than_the_profile() -> None:
    measured = MeasuredProfile(processes={"h:100": 9.0, "h:200": 9.0})
    assert slowdowns(PROFILED, [worker(0, "gpu", 2.0), worker(0, "cpu", 5.0)], measured) == {"1-2": 2.5}
    assert slowdowns(PROFILED, [worker(0, "gpu", 2.0), worker(0, "cpu")], NOTHING) == {"1-2": 1.5}


def test_they_suffice_without_a_profile_where_both_have_them() -> None:
    assert slowdowns(UNPROFILED, [worker(0, "gpu", 2.0), worker(0, "cpu", 5.0)], NOTHING) == {"1-2": 2.5}
    assert slowdowns(UNPROFILED, [worker(0, "gpu", 2.0), worker(0, "cpu")], NOTHING) == {}
    assert slowdowns(UNPROFILED, [worker(0, "gpu"), worker(0, "cpu", 5.0)], NOTHING) == {}


def test_steps_of_different_sizes_are_compared_as_the_gpu_has_them() -> None:
    """A CPU that took 3 ms for one row takes 4.5 for two, as the profile says."""
    both = [worker(0, "cpu", 3.0, rows=1.0), worker(0, "gpu", 1.0, rows=2.0)]
    assert slowdowns(PROFILED, both, NOTHING) == {"1-2": 4.5}


def test_the_slowest_stand_in_and_the_fastest_gpu_count() -> None:
    workers = [
        worker(0, "gpu", 2.0),
        worker(0, "gpu", 4.0, pid=7),
        worker(0, "cpu", 4.0),
        worker(0, "cpu", 6.0, pid=8),
    ]
    assert slowdowns(UNPROFILED, workers, NOTHING) == {"1-2": 3.0}


@pytest.mark.parametrize(
    "changed", [{"ready": False}, {"draining": True}, {"silent_ms": 10**6}], ids=["loads", "drains", "is silent"]
)
def test_a_cpu_that_is_given_no_requests_stands_in_for_none(changed: dict[str, Any]) -> None:
    gpu = worker(0, "gpu", 2.0)
    assert slowdowns(PROFILED, [gpu, replace(worker(0, "cpu", 5.0), **changed)], NOTHING) == {}
    assert slowdowns(PROFILED, [replace(gpu, draining=True), worker(0, "cpu", 5.0)], NOTHING) == {"1-2": 2.5}


def test_times_of_other_blocks_say_nothing() -> None:
    stale = worker(1, "gpu", 9.0)
    moved = replace(stale, first=1, last=2, stage=0)
    assert slowdowns(UNPROFILED, [moved, worker(0, "cpu", 5.0)], NOTHING) == {}


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({}, {}, False),
        ({}, {"1-2": 2.0}, True),
        ({"1-2": 2.0}, {}, True),
        ({"1-2": 2.0}, {"1-2": 2.19}, False),
        ({"1-2": 2.0}, {"1-2": 2.21}, True),
        ({"1-2": 2.0}, {"1-2": 1.79}, True),
    ],
)
def test_a_small_change_is_no_news(before: dict[str, float], now: dict[str, float], expected: bool) -> None:
    assert is_news(before, now) == expected


class TestPublishing:
    @pytest.fixture
    def publisher(self, cell: Cell) -> SlowdownPublisher:
        cell.scripts.run(calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class="gpu", plan="{}"))
        return SlowdownPublisher(SchedulerLinks(cell.client, cell.client, cell.keys, cell.scripts), MODEL, PROFILED)

    def shown(self, cell: Cell) -> dict[str, float] | None:
        told = cell.client.hget(cell.keys.plan(MODEL), "slowdowns")
        return json.loads(told) if told else None  # pyright: ignore[reportArgumentType]

    def test_follows_the_workers(self, cell: Cell, publisher: SlowdownPublisher) -> None:
        publisher.publish([])
        assert self.shown(cell) is None
        gpu, cpu = worker(0, "gpu"), worker(0, "cpu")
        publisher.publish([gpu, cpu])
        assert self.shown(cell) == {"1-2": 3.0}
        publisher.publish([gpu, worker(0, "cpu", 3.1)])
        assert self.shown(cell) == {"1-2": 3.0}, "that is noise"
        publisher.publish([gpu, worker(0, "cpu", 6.0)])
        assert self.shown(cell) == {"1-2": 6.0}
        publisher.publish([gpu])
        assert self.shown(cell) == {}, "no stand-in is left"
        assert cell.client.hget(cell.keys.plan(MODEL), "epoch") == b"1", "all of one plan"

    def test_takes_what_the_cell_has_measured(self, cell: Cell, publisher: SlowdownPublisher) -> None:
        record = MeasuredProfile(processes={"h:100": 2.0})
        cell.client.set(cell.keys.measured_profile(MODEL), record.to_json())
        publisher.publish([worker(0, "gpu"), worker(0, "cpu")])
        assert self.shown(cell) == {"1-2": 6.0}
        cell.client.set(cell.keys.measured_profile(MODEL), b"damaged")
        publisher.publish([worker(0, "gpu"), worker(0, "cpu")])
        assert self.shown(cell) == {"1-2": 3.0}

    @pytest.mark.parametrize("damage", ["{", "[1]", '{"1-2": "x"}'])
    def test_replaces_damaged_ones(self, cell: Cell, publisher: SlowdownPublisher, damage: str) -> None:
        publisher.publish([worker(0, "gpu"), worker(0, "cpu")])
        cell.client.hset(cell.keys.plan(MODEL), "slowdowns", damage)
        publisher.publish([worker(0, "gpu"), worker(0, "cpu")])
        assert self.shown(cell) == {"1-2": 3.0}

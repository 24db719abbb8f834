"""The number of workers wanted, as a function: an autoscaler that follows it must never lose a stage, nor oscillate."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from blockrelay.protocol.capabilities import Capabilities, Pace
from blockrelay.protocol.plan import Plan, WorkerInfo
from blockrelay_scheduler.cell_metrics.autoscaling import (
    Demand,
    Outstanding,
    demand,
    route_seconds,
    routes_wanted,
    workers_wanted,
)

TARGET_S = 30.0
CAN = Capabilities(
    exact=True, ragged=True, max_rows=512, max_sequences=16, precision="w8a8", numerics_id="n", kv_tokens=16_000
)
WORKER = WorkerInfo(
    id="w",
    model="m",
    device="cpu",
    numerics="n",
    host="h",
    pid=1,
    port=1,
    registered_ms=0,
    split="1-2,3-4",
    stage=0,
    pages=1000,
    ready=True,
    capabilities=CAN,
    pace=Pace(row_s=0.001, steps={1: 0.01, 4: 0.02}),
)


#: A GPU that loads its stage, so that no block is shown on it.
LOADING = replace(WORKER, id="g", device="gpu", split="", stage=None, ready=False)


def plan(*gpus: int) -> Plan:
    """Of four blocks in two stages, those of `gpus` given to a GPU that loads them."""
    classes = {f"block_{index}": "CPU" for index in range(1, 5)}
    given = {f"g{stage}": stage for stage in gpus}
    return Plan(epoch=1, split="1-2,3-4", route_class="cpu", assignments=given, blocks=classes, reasons=("", ""))


def loading(*gpus: int) -> list[WorkerInfo]:
    """Them."""
    return [replace(LOADING, id=f"g{stage}") for stage in gpus]


DEMANDS = st.builds(
    Demand,
    unfinished=st.integers(0, 2000),
    route_s=st.none() | st.floats(0, 1e5),
    routes=st.integers(0, 50),
    slots=st.integers(0, 64),
    held=st.floats(0, 20),
)


@given(DEMANDS, st.integers(0, 3))
def test_zero_only_when_nothing_is_unfinished_and_then_always(asked: Demand, spare: int) -> None:
    wanted = workers_wanted(asked, [], plan(), target_s=TARGET_S, spare=spare)
    assert (wanted["cpu"] == 0) == (asked.unfinished == 0)


@given(DEMANDS, st.integers(0, 3), st.sampled_from([(), (0,), (0, 1)]))
def test_every_stage_has_a_worker_of_its_class(asked: Demand, spare: int, gpus: tuple[int, ...]) -> None:
    """A GPU that loads its stage is wanted: else an autoscaler would end it."""
    asked = replace(asked, unfinished=asked.unfinished + 1)
    wanted = workers_wanted(asked, loading(*gpus), plan(*gpus), target_s=TARGET_S, spare=spare)
    assert wanted["cpu"] >= 2 - len(gpus) and wanted["gpu"] >= len(gpus)


@given(DEMANDS, st.integers(0, 500), st.floats(0, 1e4), st.floats(0, 5))
def test_more_to_do_never_asks_for_fewer(asked: Demand, requests: int, seconds: float, held: float) -> None:
    more = replace(
        asked,
        unfinished=asked.unfinished + requests,
        route_s=None if asked.route_s is None else asked.route_s + seconds,
        held=asked.held + held,
    )
    assert routes_wanted(more, target_s=TARGET_S) >= routes_wanted(asked, target_s=TARGET_S)


@given(DEMANDS)
def test_what_is_wanted_does_not_change_when_it_is_there(asked: Demand) -> None:
    """An autoscaler that has done what was asked is asked for nothing else: those that load count."""
    wanted = routes_wanted(asked, target_s=TARGET_S)
    assert routes_wanted(replace(asked, routes=wanted), target_s=TARGET_S) == wanted


@given(st.floats(1, 1e4), st.lists(st.floats(0.91, 1.09), min_size=2, max_size=40))
def test_a_load_that_wavers_by_a_tenth_settles(work_s: float, wavers: list[float]) -> None:
    """Wanted goes up to what its peak needs, and stays."""
    routes, seen = 0, list[int]()
    for waver in wavers * 2:
        asked = Demand(unfinished=1000, route_s=work_s * waver, routes=routes, slots=16, held=0.0)
        routes = routes_wanted(asked, target_s=TARGET_S)
        seen.append(routes)
    assert seen == sorted(seen) and len(set(seen[len(wavers) :])) == 1


@given(DEMANDS)
def test_no_worker_goes_whose_pages_have_no_room_elsewhere(asked: Demand) -> None:
    if asked.unfinished:
        assert routes_wanted(asked, target_s=TARGET_S) >= asked.held


def test_a_single_route_has_a_spare_worker_and_two_routes_are_spare_to_each_other() -> None:
    one = Demand(unfinished=1, route_s=1.0, routes=0, slots=16, held=0.0)
    assert workers_wanted(one, [], plan(), target_s=TARGET_S, spare=1) == {"cpu": 3, "gpu": 0}
    assert workers_wanted(one, [], plan(), target_s=TARGET_S, spare=0) == {"cpu": 2, "gpu": 0}
    assert workers_wanted(one, loading(0), plan(0), target_s=TARGET_S, spare=1) == {"cpu": 2, "gpu": 1}
    two = replace(one, unfinished=9, route_s=59.0)
    assert workers_wanted(two, [], plan(), target_s=TARGET_S, spare=1) == {"cpu": 4, "gpu": 0}


def test_before_anybody_has_measured_a_route_is_wanted_for_what_it_runs_at_once() -> None:
    asked = Demand(unfinished=100, route_s=None, routes=0, slots=0, held=0.0)
    assert routes_wanted(asked, target_s=TARGET_S) == 1, "nobody knows what one can do"
    assert routes_wanted(replace(asked, slots=16), target_s=TARGET_S) == 7


def test_work_is_measured_by_the_pace_of_those_who_live() -> None:
    work = Outstanding.from_redis({b"queued_rows": b"1000", b"running_rows": b"500", b"queued_tokens": b"400"})
    assert (work.rows, work.tokens) == (1500, 400)
    assert route_seconds(work, []) is None
    assert route_seconds(work, [WORKER]) == 1500 * 0.001 + 400 * 0.005
    silent = replace(WORKER, silent_ms=10**6, pace=Pace(row_s=9.0, steps={1: 9.0}))
    assert route_seconds(work, [WORKER, silent]) == 3.5
    slower = replace(WORKER, pace=Pace(row_s=0.003, steps={1: 0.015}))
    assert route_seconds(work, [WORKER, slower]) == 1500 * 0.0015 + 400 * 0.0075, "the mean of their speeds"


def test_a_cell_is_asked_about_its_routes_its_slots_and_its_pages() -> None:
    second = replace(WORKER, stage=1, pace=None)
    loading = replace(WORKER, ready=False, stage=None)
    leaving = replace(WORKER, draining=True)
    workers = [replace(WORKER, pages_used=500), replace(WORKER, pages_used=900), second, loading, leaving]
    asked = demand(3, Outstanding(rows=1, tokens=0), workers, plan())
    assert asked == Demand(unfinished=3, route_s=0.001, routes=2, slots=16, held=1.4)

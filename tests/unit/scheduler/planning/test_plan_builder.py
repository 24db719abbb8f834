"""The planner as tables: workers in, plan out."""

from dataclasses import replace

import pytest

from blockrelay.errors import UsageError
from blockrelay.protocol.plan import Plan, Stage, WorkerInfo, split_text, uniform_split
from blockrelay.protocol.planned_split import PlannedSplit, equal_parts
from blockrelay_scheduler.planning.assignment import empty_stages
from blockrelay_scheduler.planning.plan_builder import decide, waits_for_more


def worker(name: str, *, device: str = "cpu", age: int = 0, **more: object) -> WorkerInfo:
    """A registered worker without a stage; `age` in milliseconds, larger is older."""
    return WorkerInfo(
        id=name, model="m", device="gpu" if device == "gpu" else "cpu", numerics=str(more.pop("numerics", "n1")),
        host="h", pid=1, port=0, registered_ms=1_000_000 - age, **more,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip


def ready_gpu(name: str, split: str, stage: int, *, draining: bool = False) -> WorkerInfo:
    """A GPU worker that has loaded a stage of `split`."""
    return worker(name, device="gpu", split=split, stage=stage, ready=True, draining=draining)


def test_workers_come_one_dies_and_its_replacement_takes_its_stage() -> None:
    a, b, c = worker("a", age=30), worker("b", age=20), worker("c", age=10)
    first = decide([a, b, c], planned=equal_parts(9, 3), current=None).plan
    assert first.epoch == 1 and first.split == "1-3,4-6,7-9" and first.route_class == "cpu"
    assert first.assignments == {"a": 0, "b": 1, "c": 2}

    without_b = decide([a, c], planned=equal_parts(9, 3), current=first).plan
    assert without_b.epoch == 2 and without_b.split == first.split
    assert without_b.assignments == {"a": 0, "c": 2}

    replacement = decide([a, c, worker("d")], planned=equal_parts(9, 3), current=without_b).plan
    assert replacement.assignments == {"a": 0, "c": 2, "d": 1}


@pytest.mark.parametrize(
    ("blocks", "stages", "split"),
    [
        (9, 1, "1-9"),
        (9, 2, "1-5,6-9"),
        (9, 3, "1-3,4-6,7-9"),
        (33, 4, "1-9,10-17,18-25,26-33"),
        (2, 2, "1-1,2-2"),
    ],
)
def test_blocks_are_split_evenly(blocks: int, stages: int, split: str) -> None:
    assert split_text(uniform_split(blocks, stages)) == split


def test_a_successor_takes_the_stage_that_a_plan_gave_the_worker_that_moves() -> None:
    moved = decide([worker("a"), worker("b")], planned=UNEVEN, current=CURRENT).plan
    assert moved.assignments == {"a": 0, "b": 1} and moved.split == "1-3,4-4"
    everybody = [worker("b2", age=9, succeeds="b"), worker("a"), worker("b"), worker("a2", succeeds="a")]
    after = decide(everybody, planned=UNEVEN, current=moved).plan
    assert after.assignments == {"a2": 0, "b2": 1}, "and not by its age, as a newcomer"
    assert "1 CPU worker for it" in after.reasons[0], "a worker that leaves does not count"
    alone = decide([everybody[0], everybody[3]], planned=UNEVEN, current=after).plan
    assert alone.assignments == after.assignments
    back = decide(everybody, planned=equal_parts(4, 2), current=after).plan
    assert set(back.assignments) == {"a2", "b2"}, "another plan meanwhile is for the successors"


@pytest.mark.parametrize("stages", [0, -1, 4])
def test_a_number_of_stages_that_the_model_cannot_have_is_a_usage_error(stages: int) -> None:
    with pytest.raises(UsageError, match=f"stages is {stages}, but the model has 3 blocks: choose 1 to 3"):
        uniform_split(3, stages)


UNEVEN = PlannedSplit(
    stages=(Stage(first=1, last=3), Stage(first=4, last=4)),
    reasons=("planned for big", "planned for small"),
    devices=((), ()),
)
CURRENT = Plan(epoch=7, split="1-2,3-4", route_class="cpu", assignments={"a": 0, "b": 1}, blocks={}, reasons=())


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        pytest.param([worker("a"), worker("b")], {"a": 0, "b": 1}, id="nothing new"),
        pytest.param([worker("x")], {"x": 0}, id="all others gone"),
        pytest.param([worker("a"), worker("b"), worker("x")], {"a": 0, "b": 1, "x": 0}, id="a tie goes to the front"),
        pytest.param([worker("a"), worker("x"), worker("y")], {"a": 0, "x": 1, "y": 0}, id="the emptiest first"),
        pytest.param(
            [worker("a"), worker("y", age=1), worker("x", age=9)], {"a": 0, "x": 1, "y": 0}, id="the oldest first"
        ),
        pytest.param(
            [worker("a"), worker("b", silent_ms=1500), worker("x")],
            {"a": 0, "b": 1, "x": 1},
            id="the replacement comes before the death is declared",
        ),
        pytest.param(
            [worker("a"), worker("b", draining=True), worker("x")],
            {"a": 0, "b": 1, "x": 1},
            id="one that drains leaves room",
        ),
        pytest.param([worker("x", draining=True)], {}, id="one that drains gets no stage"),
        pytest.param(
            [worker("a"), worker("x", split="1-2,3-4", stage=0)],
            {"a": 0, "x": 0},
            id="what a worker has loaded stays, even if the plan forgot it",
        ),
        pytest.param(
            [worker("a"), worker("b"), worker("x", split="1-4", stage=0)],
            {"a": 0, "b": 1, "x": 0},
            id="a stage of another split counts for nothing",
        ),
        pytest.param(
            [worker("a"), worker("b"), worker("x", device="gpu"), worker("y", device="gpu")],
            {"a": 0, "b": 1, "x": 0, "y": 1},
            id="each device class is counted alone",
        ),
        pytest.param(
            [worker("a"), worker("b"), worker("x", numerics="n2"), worker("y", numerics="n2")],
            {"a": 0, "b": 1, "x": 0, "y": 1},
            id="each numerics id is counted alone",
        ),
    ],
)
def test_newcomers_go_where_they_are_needed(workers: list[WorkerInfo], expected: dict[str, int]) -> None:
    assert decide(workers, planned=equal_parts(4, 2), current=CURRENT).plan.assignments == expected


def named(*devices: tuple[str, ...]) -> PlannedSplit:
    """Two stages of four blocks for these devices."""
    return replace(equal_parts(4, 2), devices=devices)


@pytest.mark.parametrize(
    ("devices", "workers", "expected"),
    [
        pytest.param(
            (("x",), ("y",)),
            [("a", "y"), ("b", "x"), ("c", "y")],
            {"a": 1, "b": 0, "c": 1},
            id="where it is named",
        ),
        pytest.param((("x",), ("x",)), [("a", "x"), ("b", "x")], {"a": 0, "b": 1}, id="one device, two stages"),
        pytest.param((("x",), ()), [("a", ""), ("b", "y"), ("c", "x")], {"a": 1, "b": 1, "c": 0}, id="others"),
        pytest.param((("x",), ("y",)), [("a", ""), ("b", "z")], {"a": 0, "b": 1}, id="nobody is left out"),
    ],
)
def test_a_device_gets_a_stage_that_names_it(
    devices: tuple[tuple[str, ...], ...], workers: list[tuple[str, str]], expected: dict[str, int]
) -> None:
    crowd = [worker(name, device_id=device) for name, device in workers]
    plan = decide(crowd, planned=named(*devices), current=None).plan
    assert plan.assignments == expected and plan.devices == devices
    again = decide(crowd, planned=named(*devices), current=plan).plan
    assert again.assignments == expected, "and keeps it"


def test_classes_place_gpus_and_their_stand_ins() -> None:
    planned = equal_parts(6, 3, stage_devices="gpu,cpu,gpu")
    crowd = [worker(name, device="gpu" if name < "c" else "cpu") for name in "abcdef"]
    plan = decide(crowd, planned=planned, current=None).plan
    assert plan.assignments == {"a": 0, "b": 2, "c": 0, "d": 1, "e": 2, "f": 0}
    crowd = [ready_gpu(w.id, plan.split, plan.assignments[w.id]) if w.device == "gpu" else w for w in crowd]
    plan = decide(crowd, planned=planned, current=plan).plan
    assert [plan.blocks[f"block_{block}"] for block in (1, 3, 5)] == ["GPU", "CPU", "GPU"]


def of_classes(*stages: tuple[str, tuple[str, ...]]) -> PlannedSplit:
    """Stages with the class and the ids of their devices."""
    classes, devices = zip(*stages, strict=True)
    return replace(equal_parts(len(stages), len(stages)), devices=devices, classes=classes)


BOUND = of_classes(("CPU", ("cpu:0",)), ("GPU", ("webgpu:0", "cpu:*")), ("GPU", ("webgpu:0", "gpu:*", "cpu:*")))
UNBOUND = of_classes(("CPU", ("cpu:0",)), ("GPU", ("gpu:0",)))
SAME_NAME = of_classes(("CPU", ("cpu",)), ("GPU", ("cpu", "cpu:*")))


@pytest.mark.parametrize(
    ("planned", "workers", "expected"),
    [
        pytest.param(
            BOUND,
            [("a", "gpu", "webgpu:0"), ("b", "gpu", "webgpu:0"), ("c", "cpu", ""), ("d", "cpu", "cpu:0"),
             ("e", "cpu", "")],
            {"a": 1, "b": 2, "c": 1, "d": 0, "e": 2},
            id="bound, with stand-ins",
        ),
        pytest.param(BOUND, [("a", "gpu", "cuda:3")], {"a": 2}, id="any GPU where any is asked for"),
        pytest.param(
            UNBOUND, [("a", "gpu", "webgpu:0"), ("b", "cpu", ""), ("c", "cpu", "")], {"a": 1, "b": 0, "c": 1},
            id="a class",
        ),
        pytest.param(SAME_NAME, [("a", "gpu", "cpu"), ("b", "cpu", "cpu"), ("c", "cpu", "")], {"a": 1, "b": 0, "c": 1},
            id="the class tells devices of one name apart"),
        pytest.param(UNBOUND, [("a", "cpu", ""), ("b", "cpu", "cpu:0")], {"a": 1, "b": 0}, id="the least choice first"),
        pytest.param(
            of_classes(("", ()), ("GPU", ("gpu:0",))), [("a", "cpu", ""), ("b", "cpu", "")], {"a": 0, "b": 1}, id="free"
        ),
    ],
)  # fmt: skip
def test_workers_find_stages_of_their_device_or_class(
    planned: PlannedSplit, workers: list[tuple[str, str, str]], expected: dict[str, int]
) -> None:
    crowd = [worker(name, device=device, device_id=device_id) for name, device, device_id in workers]
    plan = decide(crowd, planned=planned, current=None).plan
    assert plan.assignments == expected


def test_a_plan_for_a_device_that_is_not_there_is_served_by_cpus() -> None:
    plan = decide([worker("a", device_id="cpu:0"), worker("b")], planned=BOUND, current=None).plan
    assert plan.assignments == {"a": 0, "b": 1} and set(plan.blocks.values()) == {"CPU"}


def test_blocks_are_read_in_the_order_of_their_numbers() -> None:
    plan = decide([worker("a")], planned=equal_parts(12, 1), current=None).plan
    read = Plan.from_redis({b"plan": plan.to_json().encode(), b"epoch": b"1"})
    assert read is not None and list(read.blocks) == [f"block_{number}" for number in range(1, 13)]


@pytest.mark.parametrize("classes", ["gpu", "gpu,cpu,gpu,cpu", "gpu,npu,cpu", "gpu,,cpu"])
def test_classes_that_no_stage_can_have_are_a_usage_error(classes: str) -> None:
    with pytest.raises(UsageError):
        equal_parts(6, 3, stage_devices=classes)


def test_devices_that_change_places_move_and_others_stay() -> None:
    crowd = [worker("a", device_id="x"), worker("b", device_id="y"), worker("c"), worker("d")]
    before = decide(crowd, planned=named(("x",), ("y",)), current=None).plan
    assert before.assignments == {"a": 0, "b": 1, "c": 0, "d": 1}
    after = decide(crowd, planned=named(("y",), ("x",)), current=before).plan
    assert after.assignments == {"a": 1, "b": 0, "c": 0, "d": 1}


def test_a_worker_that_stands_in_for_a_named_device_is_left_there() -> None:
    """Where the device that a stage names never came, one of another is moved, also when that comes back."""
    planned = named(("x",), ("y",))
    two = [worker("a", device_id="x", age=2), worker("b", device_id="x", age=1)]
    before = decide(two, planned=planned, current=None).plan
    assert before.assignments == {"a": 0, "b": 0}
    moved = decide(two, planned=planned, current=before, deserted=frozenset({1})).plan
    assert moved.assignments == {"a": 0, "b": 1}
    assert decide(two, planned=planned, current=moved).plan.assignments == {"a": 0, "b": 1}
    back = [two[0], worker("c", device_id="x")]
    assert decide(back, planned=planned, current=moved, deserted=frozenset({1})).plan.assignments == {"a": 0, "c": 1}


def test_another_number_of_stages_places_everybody_anew() -> None:
    decision = decide([worker("a", age=2), worker("b", age=1)], planned=equal_parts(4, 1), current=CURRENT)
    assert decision.plan.epoch == 8 and decision.plan.split == "1-4" and decision.plan.assignments == {"a": 0, "b": 0}


def test_gpu_stages_are_named_block_by_block() -> None:
    crowd = [worker("a"), worker("b"), ready_gpu("g", "1-2,3-4", 0)]
    plan = decide(crowd, planned=equal_parts(4, 2), current=CURRENT).plan
    assert plan.route_class == "gpu"
    assert plan.blocks == {"block_1": "GPU", "block_2": "GPU", "block_3": "CPU", "block_4": "CPU"}


@pytest.mark.parametrize(
    "absent",
    [
        worker("g", device="gpu"),
        worker("g", device="gpu", split="1-2,3-4", stage=0),
        worker("g", device="gpu", split="1-1,2-4", stage=0, ready=True),
        ready_gpu("g", "1-2,3-4", 0, draining=True),
    ],
)
def test_a_gpu_that_cannot_compute_a_stage_now_is_assigned_and_not_shown(absent: WorkerInfo) -> None:
    """It loads the stage, has one of another split, or leaves."""
    planned = equal_parts(4, 2)
    plan = decide([worker("a", age=1), absent, worker("b")], planned=planned, current=None).plan
    assert plan.route_class == "cpu" and set(plan.blocks.values()) == {"CPU"}
    assert ("g" in plan.assignments) == (not absent.draining or absent.ready)
    shown = decide([worker("a", age=1), ready_gpu("g", "1-2,3-4", 0), worker("b")], planned=planned, current=plan).plan
    assert shown.route_class == "gpu" and shown.blocks["block_2"] == "GPU"


def test_only_what_becomes_ready_may_wait_to_be_told() -> None:
    planned, cpus = equal_parts(4, 2), [worker("a", age=2), worker("b", age=1)]
    loading = [*cpus, worker("g", device="gpu"), worker("h", device="gpu")]
    one = [*cpus, ready_gpu("g", "1-2,3-4", 0), worker("h", device="gpu")]
    both = [*cpus, ready_gpu("g", "1-2,3-4", 0), ready_gpu("h", "1-2,3-4", 1)]
    plans = [decide(crowd, planned=planned, current=None) for crowd in (loading, one, both)]
    assert len({decision.inputs for decision in plans}) == 3, "each is published"
    first, second, third = (decision.plan for decision in plans)
    assert waits_for_more(first, second) and waits_for_more(second, third) and waits_for_more(first, third)
    assert not waits_for_more(third, second), "a GPU is gone"
    replaced = decide([*one[:3], worker("k", device="gpu")], planned=planned, current=None).plan
    assert not waits_for_more(first, replaced), "and this names who runs what"


def test_every_stage_says_why() -> None:
    gpus = {"1 GPU worker for it": ready_gpu("g", "1-3,4-5", 0), "1 GPU worker loads it": worker("g", device="gpu")}
    for phrase, gpu in gpus.items():
        assert decide([worker("a"), gpu, worker("b")], planned=equal_parts(5, 2), current=None).plan.reasons == (
            f"stage 0 is block_1 to block_3, 3 of 5 blocks in 2 equal parts: {phrase}, 1 CPU worker stands in",
            "stage 1 is block_4 to block_5, 2 of 5 blocks in 2 equal parts: 1 CPU worker for it",
        )
    assert decide([], planned=equal_parts(5, 1), current=None).plan.reasons == (
        "stage 0 is block_1 to block_5, the whole model: no worker yet, requests wait",
    )
    assert decide([ready_gpu("g", "1-5", 0)], planned=equal_parts(5, 1), current=None).plan.reasons == (
        "stage 0 is block_1 to block_5, the whole model: 1 GPU worker for it and no CPU worker to stand in",
    )


def test_the_hash_changes_with_the_workers_and_with_nothing_else() -> None:
    a, b = worker("a"), worker("b")
    plain = decide([a, b], planned=equal_parts(4, 2), current=None).inputs
    assert plain == decide([b, a], planned=equal_parts(4, 2), current=CURRENT).inputs
    busy = worker("a", silent_ms=900, reserved=5, ready=True)
    assert plain == decide([busy, b], planned=equal_parts(4, 2), current=None).inputs
    others = [
        decide([a], planned=equal_parts(4, 2), current=None).inputs,
        decide([a, b], planned=equal_parts(4, 1), current=None).inputs,
        decide([a, worker("b", device="gpu")], planned=equal_parts(4, 2), current=None).inputs,
        decide([a, b], planned=UNEVEN, current=None).inputs,
        decide([a, b], planned=replace(UNEVEN, reasons=("other", "reasons")), current=None).inputs,
    ]
    assert len({plain, *others}) == 6


def test_a_plan_of_any_contiguous_split_is_published_with_its_reasons() -> None:
    plan = decide([worker("a", age=9), worker("b")], planned=UNEVEN, current=CURRENT).plan
    assert (plan.split, plan.assignments) == ("1-3,4-4", {"a": 0, "b": 1})
    assert plan.reasons == (
        "stage 0 is block_1 to block_3, planned for big: 1 CPU worker for it",
        "stage 1 is block_4 to block_4, planned for small: 1 CPU worker for it",
    )


class TestDesertedStages:
    """a and b run stage 0, nobody runs stage 1 any more."""

    TWO = (worker("a", age=20), worker("b", age=10))
    PLAN = Plan(epoch=7, split="1-2,3-4", route_class="cpu", assignments={"a": 0, "b": 0}, blocks={}, reasons=("", ""))

    def test_an_empty_stage_moves_nobody_while_a_replacement_may_come(self) -> None:
        assert empty_stages(self.TWO, self.PLAN) == {1}
        assert decide(self.TWO, planned=equal_parts(4, 2), current=self.PLAN).plan.assignments == {"a": 0, "b": 0}

    def test_then_the_youngest_worker_of_the_best_staffed_stage_moves(self) -> None:
        decision = decide(self.TWO, planned=equal_parts(4, 2), current=self.PLAN, deserted=frozenset({1}))
        assert decision.plan.assignments == {"a": 0, "b": 1}
        before = decide(self.TWO, planned=equal_parts(4, 2), current=self.PLAN)
        assert decision.inputs != before.inputs, "the same workers, but another plan: it must be published"

    def test_the_last_worker_of_a_stage_never_moves(self) -> None:
        plan = replace(self.PLAN, assignments={"a": 0})
        decision = decide(self.TWO[:1], planned=equal_parts(4, 2), current=plan, deserted=frozenset({1}))
        assert decision.plan.assignments == {"a": 0}

    def test_a_silent_worker_is_no_staff(self) -> None:
        silent = replace(self.TWO[1], silent_ms=2000)
        assert empty_stages([silent], replace(self.PLAN, assignments={"b": 0})) == {0, 1}
        decision = decide([self.TWO[0], silent], planned=equal_parts(4, 2), current=self.PLAN, deserted=frozenset({1}))
        assert decision.plan.assignments == {"a": 0, "b": 0}

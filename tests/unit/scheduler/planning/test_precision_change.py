"""Which changes of precision a running cell can make, and what refuses the others."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from blockrelay.errors import UsageError
from blockrelay.protocol.plan import Plan, WorkerInfo, folder_in_force, missing_stages
from blockrelay.protocol.planned_split import equal_parts
from blockrelay.protocol.served_folder import ServedFolder
from blockrelay_scheduler.planning.plan_builder import decide
from blockrelay_scheduler.planning.precision_change import check_change, precisions_of
from tests.support.two_folders import BOTH, MODEL, OTHER, worker

PLAN = decide([worker("a", 0)], planned=equal_parts(4, 1), current=None).plan


def with_bytes(needed: int) -> tuple[ServedFolder, ...]:
    return tuple(replace(folder, bytes=needed) for folder in BOTH)


def refused(workers: Sequence[WorkerInfo], precision: str = "w4a8", plan: Plan = PLAN) -> str:
    with pytest.raises(UsageError) as error:
        check_change(workers, plan, MODEL, precision)
    return str(error.value)


def test_the_precision_and_the_key_name_a_folder() -> None:
    assert check_change([worker("a", 0)], PLAN, MODEL, "w4a8").key == OTHER
    assert check_change([worker("a", 0)], PLAN, MODEL, OTHER).precision == "w4a8"


def test_one_that_no_worker_has_is_refused() -> None:
    assert "no worker has a folder of precision fp32 (there is w4a8, w8a8)" in refused([worker("a", 0)], "fp32")


def test_one_that_a_worker_lacks_is_refused() -> None:
    said = refused([worker("a", 0), worker("g", 0, folders=BOTH[:1], device_id="webgpu:0")])
    assert said.startswith("worker g on webgpu:0 does not have w4a8")


def test_a_change_during_a_change_is_refused() -> None:
    plan = replace(PLAN, folder=OTHER)
    assert refused([worker("a", 0)], "w8a8", plan).startswith("a change to w4a8 is not over: a does not serve it yet")
    assert check_change([worker("a", 0)], plan, MODEL, "w4a8").key == OTHER, "the same one again changes nothing"


@pytest.mark.parametrize(("free", "fits"), [(29, False), (30, True)])
def test_memory_is_that_of_a_machine_when_its_workers_have_left(free: int, fits: bool) -> None:
    needed = with_bytes(100)
    workers = [
        worker("a", 0, folders=needed, held_bytes=80, free_bytes=free, node="x"),
        worker("b", 0, folders=needed, held_bytes=90, free_bytes=1000, node="x"),
    ]
    elsewhere = worker("c", 0, folders=needed, held_bytes=0, free_bytes=100, node="y")
    if fits:
        assert check_change([*workers, elsewhere], PLAN, MODEL, "w4a8").key == OTHER
    else:
        assert refused([*workers, elsewhere]).startswith(
            "worker a could not hold its part of w4a8: x lacks 1 bytes (1 B) for its weights"
        )


def test_memory_of_a_gpu_is_its_own() -> None:
    """What its machine has left is for the workers on its CPUs."""
    needed = with_bytes(100)

    def gpu(name: str, pid: int, held: int, free: int) -> WorkerInfo:
        one = worker(name, 0, folders=needed, held_bytes=held, free_bytes=free, node="x")
        return replace(one, device="gpu", device_id=f"cuda:{pid}", pid=pid)

    cpu = worker("a", 0, folders=needed, held_bytes=80, free_bytes=20, node="x")
    two, other = [gpu("g", 0, 90, 300), gpu("h", 0, 90, 20)], gpu("i", 1, 10, 90)
    assert check_change([cpu, *two, other], PLAN, MODEL, "w4a8").key == OTHER
    short = replace(other, free_bytes=89)
    assert refused([cpu, *two, short]).startswith(
        "worker i could not hold its part of w4a8: cuda:1 of x lacks 1 bytes (1 B) for its weights"
    )


def test_a_stage_without_a_worker_says_why() -> None:
    def said(one: WorkerInfo) -> list[str]:
        return missing_stages(plan, [one])

    plan = decide([worker("a", 0)], planned=equal_parts(4, 1), current=None).plan
    assert not said(worker("a", 0))
    assert said(worker("a", None)) == ["stage 0 (block_1 to block_4) has no live worker"]
    assert said(worker("a", 0, retires=True)) == ["stage 0 (block_1 to block_4) changes to another precision"]
    assert said(worker("a", None, short_of=MODEL)) == [
        "stage 0 (block_1 to block_4) has a worker that lacks memory for it"
    ]


def test_a_plan_whose_folder_no_worker_has_says_what_to_do() -> None:
    plan = replace(PLAN, folder=OTHER)
    (said,) = missing_stages(plan, [worker("a", None, folders=BOTH[:1])])
    assert said == (
        f"stage 0 (block_1 to block_4) has no live worker: the plan asks for block folder {OTHER}, which no worker "
        "has; start workers with --other-precision DIR, or change to w8a8 with `blockrelay precision set`"
    )
    for workers in (
        [worker("a", None, folders=BOTH[:1]), worker("b", None)],  # one has it
        [worker("a", None, folders=())],  # one may have it
        [worker("a", None, folders=BOTH[:1], silent_ms=60_000)],
        [],
    ):
        assert missing_stages(plan, workers) == ["stage 0 (block_1 to block_4) has no live worker"]


def test_the_folder_in_force_is_the_plans() -> None:
    def found(folder: str) -> str | None:
        one = folder_in_force(replace(PLAN, folder=folder), [worker("a", 0, folders=()), worker("b", 0)])
        return one and one.precision

    assert [found(folder) for folder in ("", OTHER, "gone")] == ["w8a8", "w4a8", None]


def test_who_serves_what() -> None:
    found = precisions_of(
        [worker("a", 0, folder=OTHER), worker("b", 0, retires=True), worker("c", None, folder=OTHER)],
        replace(PLAN, folder=OTHER),
        MODEL,
    )
    assert found.serving == {OTHER: ("a",), MODEL: ("b",)}
    assert (found.wanted, found.pending) == (OTHER, ("b", "c"))
    assert [found.name_of(key) for key in ("", MODEL, OTHER, "gone")] == ["w8a8", "w8a8", "w4a8", "gone"]

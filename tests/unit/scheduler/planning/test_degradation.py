"""A cell changes to a smaller precision where memory lacks, and back when there is room, less often each time."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from blockrelay.protocol.plan import Device, Plan, WorkerInfo
from blockrelay.protocol.planned_split import equal_parts
from blockrelay.protocol.served_folder import ServedFolder
from blockrelay.redis.plan_history import Origin, PlanEntry
from blockrelay_scheduler.planning.degradation import MemoryChange, degraded_from, memory_change
from blockrelay_scheduler.planning.plan_builder import decide
from tests.support.two_folders import BOTH, MODEL, OTHER, worker

FIRST_S = 300.0
THIRD = replace(BOTH[1], key="third", precision="w4a8,block_1=fp32")
#: w8a8, something between, and w4a8, with the bytes that a stage needs of each.
FOLDERS = (replace(BOTH[0], bytes=100), replace(THIRD, bytes=80), replace(BOTH[1], bytes=50))


def history(*entries: tuple[Origin, str, float]) -> list[PlanEntry]:
    """Entries (origin, folder, seconds after the first), given oldest first, as the plan history has them."""
    split = equal_parts(4, 1)
    return [
        PlanEntry(id=f"{int(1000 * at)}-0", planned=replace(split, folder=folder), origin=origin, who="s")
        for origin, folder, at in reversed(entries)
    ]


SETTINGS = history(("settings", "", 0))


def plan_of(workers: Sequence[WorkerInfo], folder: str = "", stages: int = 1) -> Plan:
    return decide(workers, planned=replace(equal_parts(4, stages), folder=folder), current=None).plan


def short(name: str, of: str = MODEL, *, free: int, folders: Sequence[ServedFolder] = FOLDERS) -> WorkerInfo:
    return worker(name, None, short_of=of, free_bytes=free, folders=tuple(folders), node="x")


def change(workers: Sequence[WorkerInfo], plan: Plan, entries: list[PlanEntry], at: float = 10) -> MemoryChange | None:
    return memory_change(workers, plan, entries, now_ms=int(1000 * at), first_s=FIRST_S)


@pytest.mark.parametrize(
    ("free", "folder"), [(85, "third"), (60, OTHER), (10, OTHER)], ids=["the largest that fits", "the next", "none"]
)
def test_a_worker_without_memory_gets_a_smaller_folder(free: int, folder: str) -> None:
    lacking = short("a", free=free)
    found = change([lacking], plan_of([lacking]), SETTINGS)
    assert found is not None and (found.folder, found.origin) == (folder, "degraded")
    assert "worker a on x lacks memory for its part of w8a8" in found.reason


def test_nothing_changes_while_another_worker_serves_the_stage() -> None:
    lacking, serving = short("a", free=0), worker("b", 0, folders=FOLDERS)
    assert change([lacking, serving], plan_of([lacking, serving]), SETTINGS) is None
    for gone in (replace(serving, draining=True), replace(serving, silent_ms=10**6), replace(serving, folder=OTHER)):
        assert change([lacking, gone], plan_of([lacking, gone]), SETTINGS) is not None


@pytest.mark.parametrize(("device", "standing", "changes"), [("gpu", "cpu", True), ("cpu", "gpu", False)])
def test_a_cpu_that_stands_in_for_a_gpu_does_not_count(device: Device, standing: Device, changes: bool) -> None:
    lacking = replace(short("a", free=0), device=device)
    other = replace(worker("b", 0, folders=FOLDERS), device=standing)
    assert (change([lacking, other], plan_of([lacking, other]), SETTINGS) is not None) == changes


def test_nothing_changes_without_a_smaller_folder_that_all_workers_have() -> None:
    plan = plan_of([short("a", free=0)])
    assert change([short("a", free=0, folders=FOLDERS[:1])], plan, SETTINGS) is None
    other = worker("b", 1, stages=2, folders=FOLDERS[:1])
    both = [short("a", free=0), other]
    assert change(both, plan_of(both, stages=2), SETTINGS) is None
    assert change(both, plan, SETTINGS) is not None, "a worker without a stage has no say"
    assert change([short("a", OTHER, free=0)], plan, SETTINGS) is None, "it lacks memory for a folder of before"
    assert change([], plan, SETTINGS) is None


def test_borders_that_ask_too_much_cost_no_precision_while_routes_of_before_serve() -> None:
    lacking = short("a", free=0)
    before = [worker(name, stage, stages=2, folders=FOLDERS) for stage, name in enumerate("bc")]
    assert change([lacking, *before], plan_of([lacking]), SETTINGS) is None
    assert change([lacking, before[0]], plan_of([lacking]), SETTINGS) is not None


def test_the_newest_plan_has_to_be_in_force_first() -> None:
    lacking = short("a", free=60)
    assert change([lacking], plan_of([lacking]), history(("settings", "", 0), ("degraded", OTHER, 9))) is None


DEGRADED = history(("settings", "", 0), ("degraded", OTHER, 100))


def restored(free: int, at: float, entries: list[PlanEntry] = DEGRADED) -> MemoryChange | None:
    serving = worker("a", 0, folder=OTHER, folders=FOLDERS, held_bytes=50, free_bytes=free, node="x")
    return change([serving], plan_of([serving], OTHER), entries, at)


@pytest.mark.parametrize(
    ("free", "folder"), [(37, None), (38, "third"), (61, "")], ids=["too little", "for the next", "for the largest"]
)
def test_it_goes_back_when_memory_has_room_with_a_margin(free: int, folder: str | None) -> None:
    found = restored(free, 400)
    assert (found and (found.folder, found.origin)) == (folder if folder is None else (folder, "restored"))


def test_it_goes_back_after_a_while_and_not_in_the_middle_of_a_change() -> None:
    assert restored(60, 399) is None
    serving = worker("a", 0, folder=OTHER, folders=FOLDERS, free_bytes=999)
    loading = worker("b", None, folder=OTHER, folders=FOLDERS)
    workers = [serving, loading]
    assert change(workers, plan_of(workers, OTHER), DEGRADED, 400) is None


@pytest.mark.parametrize(
    ("entries", "original", "wait_s"),
    [
        ([("settings", "", 0)], None, 0),
        ([("settings", "", 0), ("degraded", OTHER, 1)], "", 300),
        ([("settings", "", 0), ("degraded", "third", 1), ("degraded", OTHER, 2)], "", 300),
        ([("settings", "", 0), ("degraded", OTHER, 1), ("measured", OTHER, 2), ("apply", OTHER, 3)], "", 300),
        ([("settings", "", 0), ("degraded", OTHER, 1), ("restored", "", 301)], None, 0),
        ([("settings", "", 0), ("degraded", OTHER, 1), ("restored", "third", 301)], "", 300),
        ([("settings", "", 0), ("degraded", OTHER, 1), ("restored", "", 301), ("degraded", OTHER, 310)], "", 600),
        ([("settings", "", 0), ("degraded", OTHER, 1), ("restored", "", 301), ("degraded", OTHER, 2000)], "", 300),
        ([("settings", "", 0), ("degraded", OTHER, 1), ("precision", OTHER, 9)], None, 0),
        ([("settings", "", 0), ("degraded", OTHER, 1), ("rollback", "", 9)], None, 0),
        ([("settings", "", 0), ("precision", OTHER, 1), ("degraded", "third", 9)], OTHER, 300),
        ([("degraded", OTHER, 1)], None, 0),
        ([("restored", "third", 1), ("degraded", OTHER, 2)], "third", 300),
    ],
)
def test_the_history_tells_from_what_it_is_degraded(
    entries: list[tuple[Origin, str, float]], original: str | None, wait_s: float
) -> None:
    found = degraded_from(history(*entries), first_s=FIRST_S)
    assert (found and found.original) == original
    assert found is None or found.wait_s(FIRST_S) == wait_s


def test_the_wait_is_an_hour_at_most() -> None:
    bounces: list[tuple[Origin, str, float]] = [("degraded", OTHER, at) for at in range(0, 90, 10)]
    returns: list[tuple[Origin, str, float]] = [("restored", "", at + 5) for at in range(0, 90, 10)]
    entries = [one for pair in zip(bounces, returns, strict=True) for one in pair]
    found = degraded_from(history(*entries, ("degraded", OTHER, 95)), first_s=FIRST_S)
    assert found is not None and found.wait_s(FIRST_S) == 3600

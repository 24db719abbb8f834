"""The changes that another plan would bring to a running cell, and the plans that are refused there."""

from dataclasses import replace

import pytest

from blockrelay.errors import UsageError
from blockrelay.protocol.plan import IMPORTED, WorkerInfo
from blockrelay.protocol.planned_split import PlannedSplit, equal_parts
from blockrelay_scheduler.planning.plan_builder import decide
from blockrelay_scheduler.planning.plan_change import change, unserved_gpus


def worker(name: str, gpu: str = "", *, device_id: str = "") -> WorkerInfo:
    return WorkerInfo(
        id=name, model="m", device="gpu" if gpu else "cpu", numerics=gpu, host="h", pid=1, port=0, registered_ms=1,
        device_id=gpu or device_id,
    )  # fmt: skip


def on_gpu(*ids: str) -> PlannedSplit:
    """The second of two stages is for these GPUs."""
    return replace(equal_parts(4, 2), devices=(("cpu:0",), ids), classes=("CPU", "GPU"))


CPUS = (worker("a"), worker("b", device_id="cpu:0"))
CURRENT = decide(CPUS, planned=equal_parts(4, 2), current=None).plan


@pytest.mark.parametrize(
    ("ids", "gpus", "lost"),
    [
        (("webgpu:0", "cpu:*"), ["webgpu:0"], []),
        (("webgpu:0", "cpu:*"), [], ["webgpu:0"]),
        (("gpu:0",), ["webgpu:0"], []),
        (("gpu:0", "cpu:*"), [], ["webgpu:0"]),
        (("gpu:*", "cpu:*"), [], []),
    ],
    ids=["its id", "it comes back", "its class", "its class comes back", "any"],
)
def test_a_plan_for_devices_that_are_there_is_taken(ids: tuple[str, ...], gpus: list[str], lost: list[str]) -> None:
    crowd = [*CPUS, *(worker(f"on {gpu}", gpu) for gpu in gpus)]
    found = change(crowd, on_gpu(*ids), CURRENT, lost=lost)
    assert {gpu: found.plan.assignments[f"on {gpu}"] for gpu in gpus} == dict.fromkeys(gpus, 1)
    assert set(found.plan.blocks.values()) == {"CPU"}, "a worker that loads its blocks first serves nobody yet"


@pytest.mark.parametrize(
    ("ids", "gpus", "said"),
    [
        (("webgpu:0", "cpu:*"), [], "stage 3-4 is for webgpu:0, which no worker has: none has a GPU; start its worker"),
        (("webgpu:1",), ["webgpu:0"], "stage 3-4 is for webgpu:1, which no worker has: they have webgpu:0"),
        (("gpu:0",), [], "stage 3-4 is for gpu:0, which no worker has: none has a GPU"),
    ],
)
def test_a_plan_for_devices_that_are_not_there_is_refused(ids: tuple[str, ...], gpus: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        change([*CPUS, *(worker(f"on {gpu}", gpu) for gpu in gpus)], on_gpu(*ids), CURRENT)


def test_a_device_that_has_gone_meanwhile_is_told() -> None:
    planned = on_gpu("webgpu:0", "cpu:*")
    there = [*CPUS, worker("g", "webgpu:0")]
    plan = change(there, planned, CURRENT).plan
    assert unserved_gpus(plan, planned, there) == []
    said = "stage 3-4 is for webgpu:0, and no worker has it now: CPUs serve it until one comes"
    assert unserved_gpus(plan, planned, CPUS) == [said]
    assert unserved_gpus(CURRENT, equal_parts(4, 2), CPUS) == []


def test_an_import_serves_all_blocks_as_one_stage() -> None:
    """Its worker gets no other stage, and a plan that has several is refused while it is there."""
    imported = replace(worker("imported"), numerics=f"fp16-{IMPORTED}-0123456789abcdef")
    crowd = [imported, *CPUS]
    with pytest.raises(UsageError, match="the plan has 2 stages, and imported computes with an import"):
        change(crowd, equal_parts(4, 2), CURRENT)
    assert set(decide(crowd, planned=equal_parts(4, 2), current=None).plan.assignments) == {"a", "b"}
    assert "imported" in change(crowd, equal_parts(4, 1), CURRENT).plan.assignments

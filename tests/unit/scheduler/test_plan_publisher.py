"""When a plan is published: for a GPU that has become ready soon but not often, and for one that is gone at once."""

import pytest

from blockrelay.protocol.plan import Plan
from blockrelay.protocol.planned_split import equal_parts
from blockrelay.protocol.transitions import calls
from blockrelay.redis.registry import read_workers
from blockrelay_scheduler import plan_publisher
from blockrelay_scheduler.link import SchedulerLinks
from blockrelay_scheduler.plan_publisher import PlanPublisher
from tests.support.cell import MODEL, Cell
from tests.support.worker.registering import enter


def load(cell: Cell, name: str) -> None:
    """A GPU worker registers and loads what it is given."""
    enter(cell.client, cell.keys, name, model=MODEL, numerics="g", device="gpu")


@pytest.fixture
def publisher(cell: Cell) -> PlanPublisher:
    link = SchedulerLinks(cell.client, cell.client, cell.keys, cell.scripts)
    return PlanPublisher(link, MODEL, equal_parts(4, 2), vacancy_s=60, name="one")


def shown(cell: Cell, publisher: PlanPublisher) -> Plan:
    return publisher.publish(read_workers(cell.client, cell.keys, MODEL), trusted=True)


def test_gpus_are_shown_once_they_are_ready_and_until_they_are_gone(
    cell: Cell, publisher: PlanPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_publisher, "READY_EVERY_S", 3600.0)
    assert shown(cell, publisher).route_class == "cpu", "nobody is there"
    for name in ("g0", "g1"):
        load(cell, name)
    loading = shown(cell, publisher)
    assert (loading.assignments, loading.route_class) == ({"g0": 0, "g1": 1}, "cpu")
    cell.worker("g0", stage=0, device="gpu", numerics="g")
    ready = shown(cell, publisher)
    assert (ready.epoch, ready.route_class, ready.blocks["block_4"]) == (loading.epoch + 1, "gpu", "CPU")
    assert shown(cell, publisher).epoch == ready.epoch
    cell.worker("g1", stage=1, device="gpu", numerics="g")
    assert shown(cell, publisher) == ready, "it was told lately who is ready"
    cell.scripts.run(calls.dead("g0", silent_s=0))
    gone = shown(cell, publisher)
    assert (gone.epoch, gone.blocks["block_1"], gone.blocks["block_4"]) == (ready.epoch + 1, "CPU", "GPU"), "at once"
    cell.worker("g2", stage=0, device="gpu", numerics="g")
    assert set(shown(cell, publisher).blocks.values()) == {"GPU"}, "with the stage that it is given"
    cell.scripts.run(calls.dead("g2", silent_s=0))
    load(cell, "g3")
    without = shown(cell, publisher)
    cell.worker("g3", stage=0, device="gpu", numerics="g")
    assert shown(cell, publisher) == without
    monkeypatch.setattr(plan_publisher, "READY_EVERY_S", 0.0)
    assert set(shown(cell, publisher).blocks.values()) == {"GPU"}, "a while later"

"""A worker prepares another stage beside the one that it serves, and goes when all stages of the plan have workers."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import pytest

from blockrelay.errors import BlockFolderError, UsageError
from blockrelay.protocol.plan import Plan, Stage
from blockrelay_worker.lifecycle.changes.retirement import Retirement
from blockrelay_worker.lifecycle.changes.succession import Place, Succession
from blockrelay_worker.transport.redis_links import Stopping
from tests.support.cell import MODEL, Cell
from tests.support.waiting import wait_until
from tests.support.worker.links import links_of

NEXT = Place(Stage(first=1, last=3), MODEL)
PLAN = Plan(epoch=2, split="1-3,4-4", route_class="cpu", assignments={}, blocks={}, reasons=())

OTHER_PLAN = replace(PLAN, epoch=3, split="1-1,2-4")


class PlayedService:
    """A service that the test lets register and end."""

    def __init__(self, how_it_starts: Callable[[], None]) -> None:
        self._how_it_starts = how_it_starts
        self.split, self.is_overtaken = "", False
        self.over = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        self._how_it_starts()
        self.split = PLAN.split
        self.over.wait(30)
        if self.error is not None:
            raise self.error


@pytest.fixture
def old(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> Cell:
    """Workers `a` and `b` of the plan before, which look as often as they are asked."""
    monkeypatch.setattr("blockrelay_worker.lifecycle.changes.succession.LOOK_S", 0.0)
    monkeypatch.setattr("blockrelay_worker.lifecycle.changes.succession.LOOK_SHARE", 1.0)
    for stage, name in enumerate("ab"):
        cell.worker(name, split="1-2,3-4", stage=stage)
    return cell


@pytest.fixture
def service(old: Cell) -> Iterator[PlayedService]:
    """The successor of `a`, not started."""
    played = PlayedService(lambda: None)
    yield played
    played.over.set()


def begun(cell: Cell, service: PlayedService | None, place: Place = NEXT) -> Succession:
    asked: list[Place] = []

    def make(place: Place) -> PlayedService | None:
        asked.append(place)
        return service

    succession = succession_of(cell, make)
    succession.begin(place)
    assert asked == [place] and succession.has_begun
    return succession


def succession_of(cell: Cell, make: Callable[[Place], PlayedService | Literal["later"] | None]) -> Succession:
    """The change of the worker `a`, which serves the folder with which it started."""
    links = links_of(cell)
    retirement = Retirement(links, MODEL, "a", split="1-2,3-4", folder=MODEL, numerics="n1")
    return Succession(links, MODEL, MODEL, retirement, make)


def test_it_goes_when_every_stage_has_a_worker_that_stays(old: Cell, service: PlayedService) -> None:
    succession = begun(old, service)
    wait_until(lambda: service.split, "the successor serves")
    assert not succession.is_over(PLAN), "nobody is registered for the new stages"
    old.worker("a2", split="1-3,4-4", stage=0, succeeds="a")
    assert not succession.is_over(PLAN), "the second stage has nobody"
    old.worker("b2", split="1-3,4-4", stage=1, succeeds="b")
    old.worker("b3", split="1-1,2-4", stage=1, succeeds="b2")
    assert not succession.is_over(PLAN), "the worker of the second stage leaves it for another plan"
    old.worker("c", split="1-3,4-4", stage=1)
    assert succession.is_over(PLAN) and succession.failure is None
    assert not succession.is_over(PLAN), "it says so once"
    service.over.set()
    succession.join()
    assert succession.failure is None, "its end, later, has nothing to do with the change"


def test_a_leave_is_called_off_until_it_has_begun(old: Cell, service: PlayedService) -> None:
    succession = begun(old, service)
    wait_until(lambda: service.split, "the successor serves")
    for stage, name in enumerate(("a2", "b2")):
        old.worker(name, split="1-3,4-4", stage=stage, succeeds="ab"[stage])
    assert succession.is_over(PLAN)
    first = succession.departure
    succession.call_off()
    assert not first.begin(), "the engine finds it called off"
    assert succession.is_over(PLAN), "and is told again when the plan comes back"
    assert succession.departure.begin()
    succession.call_off()
    assert not succession.is_over(PLAN), "it is on its way"


def test_of_two_whole_routes_the_successor_makes_room_for_yet_another_plan(old: Cell, service: PlayedService) -> None:
    succession = begun(old, service)
    wait_until(lambda: service.split, "the successor serves")
    for stage, name in enumerate(("a2", "b2")):
        old.worker(name, split="1-3,4-4", stage=stage, succeeds="ab"[stage])
    assert not succession.is_over(OTHER_PLAN), "its own route is whole"


def test_it_makes_room_itself_where_only_the_successors_route_is_whole(old: Cell, service: PlayedService) -> None:
    succession = begun(old, service)
    wait_until(lambda: service.split, "the successor serves")
    old.worker("a2", split="1-3,4-4", stage=0, succeeds="a")
    old.client.hset(old.keys.worker("b"), "draining", 1)
    assert not succession.is_over(OTHER_PLAN), "neither route is whole: the successor goes"
    old.worker("b2", split="1-3,4-4", stage=1, succeeds="b")
    assert succession.is_over(OTHER_PLAN)


def test_one_that_comes_too_early_is_asked_for_again(old: Cell, service: PlayedService) -> None:
    answers: list[PlayedService | Literal["later"]] = ["later", service]
    succession = succession_of(old, lambda _: answers.pop(0))
    succession.begin(NEXT)
    assert not succession.has_begun and succession.failure is None and not succession.is_over(PLAN)
    succession.begin(NEXT)
    assert succession.has_begun and succession.service is service


def test_without_memory_for_both_it_leaves_at_once(old: Cell) -> None:
    succession = begun(old, None)
    assert succession.failure == "the plan gives this worker another stage, and there is no room for both"
    assert not succession.is_over(PLAN)
    succession.join()


def test_one_that_another_plan_overtook_makes_room_for_the_next(old: Cell, service: PlayedService) -> None:
    succession = begun(old, service)
    wait_until(lambda: service.split, "the successor serves")
    service.is_overtaken = True
    assert not succession.is_over(replace(PLAN, split="1-2,3-4")), "the plan of before is in force again: it stays"
    service.over.set()
    wait_until(lambda: not succession.has_begun, "it may begin again")
    assert succession.failure is None and succession.service is None
    service.is_overtaken = False
    service.over.clear()
    succession.begin(NEXT)
    assert succession.service is service


@pytest.mark.parametrize("error", [BlockFolderError("block_3 is altered"), Stopping(), MemoryError()])
def test_a_successor_that_never_serves_has_the_worker_leave_and_load_again(old: Cell, error: Exception) -> None:
    def fails() -> None:
        raise error

    succession = begun(old, PlayedService(fails))
    wait_until(lambda: succession.failure, "it has failed")
    assert "could not be loaded beside this one" in (succession.failure or "")
    succession.join()  # raises nothing: the worker's own try to load says what is wrong


def test_the_error_of_one_that_serves_is_the_workers(old: Cell, service: PlayedService) -> None:
    succession = begun(old, service)
    wait_until(lambda: service.split, "the successor serves")
    for stage, name in enumerate(("a2", "b2")):
        old.worker(name, split="1-3,4-4", stage=stage, succeeds="ab"[stage])
    assert succession.is_over(PLAN)
    service.error = MemoryError("later")
    service.over.set()
    with pytest.raises(MemoryError):
        succession.join()


@pytest.mark.parametrize("error", [BlockFolderError("block_2 is damaged"), UsageError("no room on cuda:0")])
def test_a_folder_that_can_never_be_served_has_it_stay(old: Cell, error: Exception) -> None:
    def make(place: Place) -> None:
        raise error

    succession = succession_of(old, make)
    succession.begin(Place(Stage(first=1, last=2), "other"))
    assert succession.has_begun and succession.failure is None and not succession.is_over(PLAN)

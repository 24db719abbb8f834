"""The block folder of each worker while a cell changes from one precision to another."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from blockrelay.protocol.plan import Plan, WorkerInfo
from blockrelay.protocol.planned_split import equal_parts
from blockrelay.protocol.served_folder import folders_from_json, folders_to_json
from blockrelay_scheduler.planning.plan_builder import decide
from tests.support.two_folders import BOTH, MODEL, OTHER, worker


class Changing:
    """A cell of some workers; each look gives it the plan that a scheduler would publish."""

    def __init__(self, workers: Sequence[WorkerInfo], stages: int) -> None:
        self.workers, self.stages = list(workers), stages
        self.plan = self._decided("", None)

    def _decided(self, folder: str, current: Plan | None) -> Plan:
        planned = replace(equal_parts(4, self.stages), folder=folder)
        return decide(self.workers, planned=planned, current=current).plan

    def look(self, folder: str = OTHER) -> Mapping[str, str]:
        """The folder of each worker by the next plan."""
        self.plan = self._decided(folder, self.plan)
        return {one.id: self.plan.folder_of(one.id) or MODEL for one in self.workers}

    def now(self, name: str, **fields: object) -> None:
        self.workers = [replace(one, **fields) if one.id == name else one for one in self.workers]  # pyright: ignore[reportArgumentType]


def test_a_plan_names_no_folder_before_somebody_wants_another_one() -> None:
    cell = Changing([worker("a", 0)], 1)
    assert (cell.plan.folder, cell.plan.other_folders) == ("", {})
    assert "folder" not in cell.plan.to_json(), "services of the release before read the plan"


def test_half_of_each_stage_changes_at_once_and_the_last_ones_together() -> None:
    cell = Changing([worker(f"{stage}{n}", stage, 2) for stage in (0, 1) for n in range(3)], 2)
    first = {"00": OTHER, "01": MODEL, "02": MODEL, "10": OTHER, "11": MODEL, "12": MODEL}
    assert cell.look() == first
    assert cell.look() == first, "the next ones wait"
    for name in ("00", "10"):
        cell.now(name, ready=False, stage=None, folder=OTHER)
    assert cell.look() == first, "they load"
    for name, stage in (("00", 0), ("10", 1)):
        cell.now(name, ready=True, stage=stage, folder=OTHER)
    assert cell.look() == {**first, "01": OTHER, "11": OTHER}
    for name in ("01", "11"):
        cell.now(name, folder=OTHER)
    assert set(cell.look().values()) == {OTHER}, "the last of each stage together"
    assert cell.plan.other_folders == {}


def test_a_stage_with_one_worker_has_all_change_together() -> None:
    cell = Changing([worker("a", 0, 2), worker("b", 0, 2), worker("c", 1, 2)], 2)
    assert set(cell.look().values()) == {OTHER}
    assert set(cell.look().values()) == {OTHER}, "and no look takes it back"


def test_one_that_comes_back_during_the_last_change_changes_too() -> None:
    cell = Changing([worker("a", 0, 2), worker("b", 1, 2)], 2)
    cell.look()
    b = cell.workers.pop()  # followed by another worker of its process, which leaves again
    cell.look()
    cell.workers.append(b)
    assert set(cell.look().values()) == {OTHER}, "it would lose the requests that it has begun"


def test_a_change_back_keeps_those_that_have_not_begun() -> None:
    cell = Changing([worker("a", 0), worker("b", 0)], 1)
    assert cell.look() == {"a": OTHER, "b": MODEL}
    assert set(cell.look("").values()) == {MODEL}


def test_a_worker_without_the_folder_keeps_its_own() -> None:
    cell = Changing([worker("a", 0), worker("gpu", 0, folders=BOTH[:1])], 1)
    assert cell.look() == {"a": OTHER, "gpu": MODEL}
    cell.now("a", folder=OTHER)
    assert cell.look() == {"a": OTHER, "gpu": MODEL}


def test_a_newcomer_gets_the_folder_that_is_wanted() -> None:
    cell = Changing([worker("a", 0)], 1)
    cell.workers.append(worker("b", None))
    assert cell.look()["b"] == OTHER


def test_records_say_which_folders_a_worker_can_serve() -> None:
    assert folders_from_json(folders_to_json(BOTH).encode()) == BOTH
    assert folders_from_json(None) == (), "a worker of a release that wrote none"
    later = json.loads(folders_to_json(BOTH[:1]))[0] | {"added": "by a later release"}
    assert folders_from_json(json.dumps([later]).encode()) == BOTH[:1]
    for damaged in (b'[{"key": "k"}]', b"null", b'{"a": 1}', b"[", b"[5]", json.dumps([later | {"key": 1}]).encode()):
        assert folders_from_json(damaged) == (), damaged


def gpu(name: str, stage: int, pid: int, stages: int = 1) -> WorkerInfo:
    return worker(name, stage, stages, device="gpu", pid=pid, node="x", registered_ms=0)


def test_cpus_change_before_gpus() -> None:
    """CPU workers that have changed take new requests of the GPU's class while the GPU ends its own."""
    cell = Changing([gpu("g", 0, 1), worker("a", 0)], 1)
    assert cell.look() == {"a": OTHER, "g": MODEL}
    cell.now("a", folder=OTHER)
    assert cell.look() == {"a": OTHER, "g": OTHER}


def test_the_stages_of_a_device_change_together() -> None:
    """In whichever stages they are: half of the devices at once."""
    cell = Changing([gpu("g0", 0, 1, 2), gpu("g1", 1, 1, 2), gpu("h0", 0, 2, 2), gpu("h1", 1, 2, 2)], 2)
    first = {"g0": OTHER, "g1": OTHER, "h0": MODEL, "h1": MODEL}
    assert cell.look() == first
    for name in ("g0", "g1"):
        cell.now(name, folder=OTHER)
    assert set(cell.look().values()) == {OTHER}


def test_a_device_waits_whole_where_one_of_its_stages_has_to() -> None:
    cpus = [worker("c", 1, 2, registered_ms=0)]
    cell = Changing([*cpus, gpu("g0", 0, 1, 2), gpu("g1", 1, 1, 2), gpu("h0", 0, 2, 2), gpu("h1", 1, 2, 2)], 2)
    assert cell.look() == {"c": OTHER, "g0": MODEL, "g1": MODEL, "h0": MODEL, "h1": MODEL}
    cell.now("c", folder=OTHER)
    assert cell.look() == {"c": OTHER, "g0": OTHER, "g1": OTHER, "h0": MODEL, "h1": MODEL}


def test_two_stages_of_a_device_that_are_the_same_do_not_wait_for_each_other() -> None:
    cell = Changing([gpu("g", 0, 1), gpu("h", 0, 1)], 1)
    assert set(cell.look().values()) == {OTHER}


def test_a_device_whose_worker_came_back_with_the_new_folder_changes_whole() -> None:
    """A device has memory for one folder: its worker that came back waits until the other one has left."""
    cell = Changing([gpu("g0", 0, 1, 2), gpu("g1", 1, 1, 2), gpu("h0", 0, 2, 2), gpu("h1", 1, 2, 2)], 2)
    assert cell.look()["h0"] == MODEL
    cell.workers[2] = worker("again", None, device="gpu", pid=2, node="x", folder=OTHER)
    assert cell.look() == {"g0": OTHER, "g1": OTHER, "again": OTHER, "h1": OTHER}

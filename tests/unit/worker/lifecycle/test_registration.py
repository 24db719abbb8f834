"""How a worker enters the registry, on a real Redis; the test plays the scheduler."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from blockrelay.protocol.constants import MAX_WORKERS
from blockrelay.protocol.plan import Plan
from blockrelay.protocol.transitions import calls
from blockrelay.redis.registry import read_workers
from blockrelay.settings import WorkerSettings
from blockrelay_worker.lifecycle.registration import Registration, StageAssignment
from blockrelay_worker.transport.redis_links import Links, Stopping
from tests.support.cell import MODEL, Cell, begin_cell
from tests.support.waiting import wait_until
from tests.support.worker.links import links_of


class Waiting:
    """A registration that waits for its stage in a thread of its own."""

    def __init__(self, links: Links) -> None:
        self.registration = Registration(links, WorkerSettings(host="h"), model=MODEL, numerics="n", port=1)
        self.assignment: StageAssignment | None = None
        self.thread = threading.Thread(target=self._wait)

    def _wait(self) -> None:
        try:
            self.assignment = self.registration.wait_for_assignment()
        except Stopping:
            return


@contextmanager
def waiting(cell: Cell) -> Iterator[Waiting]:
    stop = threading.Event()
    worker = Waiting(links_of(cell, stop=stop))
    worker.thread.start()
    try:
        yield worker
    finally:
        stop.set()
        worker.thread.join(10)
    assert not worker.thread.is_alive()


def there(cell: Cell) -> list[str]:
    return [worker.id for worker in read_workers(cell.client, cell.keys, MODEL)]


def assign(cell: Cell, worker_id: str) -> None:
    plan = Plan(epoch=0, split="1-4", route_class="cpu", assignments={worker_id: 0}, blocks={}, reasons=())
    call = calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class="cpu", plan=plan.to_json())
    assert cell.scripts.run(call) == 1


def declared_dead(cell: Cell, worker_id: str) -> None:
    assert cell.scripts.run(calls.dead(worker_id, silent_s=0)) == (True, 0)


def everything_lost(cell: Cell, worker_id: str) -> None:
    begin_cell(cell.client, cell.keys)


@pytest.mark.parametrize("lose", [declared_dead, everything_lost])
def test_a_worker_whose_record_vanishes_while_it_waits_registers_anew(
    cell: Cell, lose: Callable[[Cell, str], Any]
) -> None:
    with waiting(cell) as worker:
        wait_until(lambda: there(cell), "it has registered")
        (before,) = there(cell)
        lose(cell, before)
        wait_until(lambda: there(cell) not in ([], [before]), "it has registered under a new id")
        (after,) = there(cell)
        assign(cell, after)
        worker.thread.join(10)
        assert worker.assignment is not None and worker.registration.worker_id == after
        assert [name.decode() for name in cell.client.zrange(cell.keys.workers, 0, -1)] == [after]  # pyright: ignore


def test_who_was_forgotten_while_it_loaded_learns_it_before_it_announces(cell: Cell) -> None:
    with waiting(cell) as worker:
        wait_until(lambda: there(cell), "it has registered")
        assign(cell, worker.registration.worker_id)
        worker.thread.join(10)
        assert not worker.registration.forgotten()
        declared_dead(cell, worker.registration.worker_id)
        assert worker.registration.forgotten()
        assert not cell.client.exists(cell.keys.workers)


def test_whoever_has_read_the_registry_lately_reads_it_again_for_a_newcomer(cell: Cell) -> None:
    with waiting(cell) as worker:
        wait_until(lambda: there(cell), "it has registered")
        assign(cell, worker.registration.worker_id)
        worker.thread.join(10)
    assert worker.assignment is not None
    cell.accept()
    assert cell.client.exists(cell.keys.fleet(MODEL))
    worker.registration.announce(worker.assignment, pages=9, slots=1)
    assert not cell.client.exists(cell.keys.fleet(MODEL))


def test_a_full_cell_lets_nobody_else_in_until_there_is_room(cell: Cell, capsys: pytest.CaptureFixture[str]) -> None:
    others = {f"w{i}": 1.0 for i in range(MAX_WORKERS)}
    cell.client.zadd(cell.keys.workers, others)
    said: list[str] = []

    def told() -> bool:
        said.append(capsys.readouterr().out)
        return "CELL_FULL" in "".join(said)

    with waiting(cell):
        wait_until(told, "it says why it waits")
        assert there(cell) == [] and cell.client.zcard(cell.keys.workers) == MAX_WORKERS
        cell.client.zrem(cell.keys.workers, "w7")
        wait_until(lambda: there(cell), "it has registered")

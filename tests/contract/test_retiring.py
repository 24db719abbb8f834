"""A worker that retires, because it gets another block folder, finishes what it has begun and takes nothing new."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from blockrelay.protocol.plan import Plan
from blockrelay.protocol.transitions import calls
from blockrelay.redis.registry import read_workers
from blockrelay_worker.lifecycle.changes.retirement import Retirement
from tests.support.cell import MODEL, Cell
from tests.support.worker.links import links_of

PLAN = Plan(epoch=2, split="1-4", route_class="cpu", assignments={"a": 0, "b": 0}, blocks={}, reasons=(), folder="f2")


@pytest.fixture
def fleet(cell: Cell) -> Iterator[Cell]:
    """A worker `a` of the numerics id `n1`, and `b` of `n2`."""
    cell.agree(dead_after_s=3600)
    cell.worker("a", split="1-4")
    cell.worker("b", split="1-4", numerics="n2")
    yield cell


def retires(cell: Cell, worker: str) -> None:
    cell.client.hset(cell.keys.worker(worker), "retires", 1)


def retirement_of(cell: Cell, worker: str = "a", numerics: str = "n1") -> Retirement:
    return Retirement(links_of(cell), MODEL, worker, split="1-4", folder=MODEL, numerics=numerics)


def may_go(cell: Cell, retirement: Retirement, plan: Plan = PLAN) -> bool:
    return retirement.is_complete(plan, read_workers(cell.client, cell.keys, MODEL))


def test_it_takes_no_new_request(fleet: Cell) -> None:
    retires(fleet, "a")
    fleet.accept()
    assert not fleet.claim("a")
    assert [run.request_id for run in fleet.claim("b")] == ["req-1"]


def test_it_goes_on_with_requests_that_have_its_tokens(fleet: Cell) -> None:
    run = fleet.begin("a", [7, 8])
    retires(fleet, "a")
    fleet.rerun(run)
    assert not fleet.claim("b"), "no other worker can continue its bits"
    (again,) = fleet.claim("a")
    assert list(again.tokens) == [7, 8]


def test_one_without_a_token_starts_again_elsewhere(fleet: Cell) -> None:
    run = fleet.begin("a")
    retires(fleet, "a")
    fleet.rerun(run)
    assert not fleet.claim("a")
    assert [again.request_id for again in fleet.claim("b")] == ["req-1"]


def test_no_new_request_has_a_route_through_one_of_a_later_stage(cell: Cell) -> None:
    cell.agree(dead_after_s=3600)
    for stage, name in enumerate("ab"):
        cell.worker(name, stage=stage)
    run = cell.begin("a", [7])
    retires(cell, "b")
    cell.accept("req-2")
    assert not cell.claim("a")
    cell.rerun(run)
    assert [again.request_id for again in cell.claim("a")] == ["req-1"], "those with tokens have"


def test_it_stays_until_no_request_needs_its_bits(fleet: Cell) -> None:
    run, retirement = fleet.begin("a", [7]), retirement_of(fleet)
    assert not may_go(fleet, retirement), "the first look only begins"
    assert fleet.client.hget(fleet.keys.worker("a"), "retires") == b"1"
    assert not may_go(fleet, retirement), "a request runs here"
    fleet.rerun(run)
    assert not may_go(fleet, retirement), "it waits for this id"
    (again,) = fleet.claim("a")
    fleet.commit(again, 1, [8], end="stop")
    assert may_go(fleet, retirement)


def test_a_request_of_another_worker_of_its_id_keeps_it(fleet: Cell) -> None:
    fleet.worker("a2", split="1-4")
    fleet.begin("a2", [7])
    retirement = retirement_of(fleet)
    assert not may_go(fleet, retirement) and not may_go(fleet, retirement), "the other one is told to change too"


def test_it_goes_where_others_of_its_id_stay(fleet: Cell) -> None:
    fleet.begin("a", [7])
    retirement = retirement_of(fleet)
    fleet.worker("a2", split="1-4")
    staying = replace(PLAN, assignments={"a": 0, "b": 0, "a2": 0}, other_folders={"a2": MODEL})
    assert not may_go(fleet, retirement, staying)
    assert may_go(fleet, retirement, staying)


def test_it_is_called_off(fleet: Cell) -> None:
    retirement = retirement_of(fleet)
    may_go(fleet, retirement)
    retirement.call_off()
    fleet.accept()
    assert [run.request_id for run in fleet.claim("a")] == ["req-1"]
    assert not may_go(fleet, retirement), "another one begins from the start"


def test_one_that_is_dead_gets_no_record(fleet: Cell) -> None:
    fleet.client.delete(fleet.keys.worker("a"))
    may_go(fleet, retirement_of(fleet))
    assert not fleet.client.exists(fleet.keys.worker("a"))


def test_it_goes_on_with_requests_that_were_free_to_go_elsewhere(fleet: Cell) -> None:
    """Its id had no worker for a while: MIGRATE released them."""
    fleet.begin("a", [7])
    fleet.scripts.run(calls.dead("a", silent_s=0))
    fleet.scripts.run(calls.migrate(MODEL, patience_s=0))
    fleet.accept("req-2")
    fleet.worker("a2", split="1-4")
    retires(fleet, "a2")
    assert [again.request_id for again in fleet.claim("a2")] == ["req-1"]


def test_it_does_not_wait_for_a_request_that_no_route_of_its_id_can_take(cell: Cell) -> None:
    """A later stage goes where no route could take a freed request: without memory for both, others wait for that."""
    cell.agree(dead_after_s=3600)
    for stage, name in enumerate("ab"):
        cell.worker(name, stage=stage)
    cell.begin("a", [7])
    retirement = Retirement(links_of(cell), MODEL, "b", split="1-2,3-4", folder=MODEL, numerics="n1")
    may_go(cell, retirement)
    cell.scripts.run(calls.dead("a", silent_s=0))
    assert not may_go(cell, retirement), "another worker of this id may come for it"
    cell.scripts.run(calls.migrate(MODEL, patience_s=0))
    assert may_go(cell, retirement), "none came in time"


def test_it_stays_where_the_others_have_too_few_pages(fleet: Cell) -> None:
    fleet.begin("a", [7], need=5)
    fleet.worker("a2", split="1-4", pages=4)
    retirement, staying = retirement_of(fleet), replace(PLAN, assignments={"a2": 0}, other_folders={"a2": MODEL})
    may_go(fleet, retirement, staying)
    assert not may_go(fleet, retirement, staying)
    fleet.client.hset(fleet.keys.worker("a2"), "pages", 5)
    assert may_go(fleet, retirement, staying)


def test_it_says_again_what_redis_has_lost(fleet: Cell) -> None:
    retirement = retirement_of(fleet)
    may_go(fleet, retirement)
    fleet.client.hdel(fleet.keys.worker("a"), "retires")
    assert not may_go(fleet, retirement), "it could have got a new request"
    assert fleet.client.hget(fleet.keys.worker("a"), "retires") == b"1"
    assert may_go(fleet, retirement)


def test_a_redis_that_has_lost_that_it_was_called_off_hears_it_again(fleet: Cell) -> None:
    retirement = retirement_of(fleet)
    may_go(fleet, retirement)
    retirement.call_off()
    retires(fleet, "a")
    retirement.call_off()
    fleet.accept()
    assert fleet.claim("a")


def test_a_request_on_a_gpu_ends_where_it_runs(cell: Cell) -> None:
    """Others of its id stay, but workers of the new folder could take it from them: any id may go on with it."""
    cell.agree(dead_after_s=3600)
    cell.worker("g", split="1-4", numerics="n3", varies=True, device="gpu")
    run = cell.begin("g", [7])
    cell.worker("g2", split="1-4", numerics="n3", varies=True, device="gpu")
    retirement = retirement_of(cell, "g", "n3")
    staying = replace(PLAN, assignments={"g": 0, "g2": 0}, other_folders={"g2": MODEL})
    assert not may_go(cell, retirement, staying) and not may_go(cell, retirement, staying)
    cell.begin("g2", [9], request_id="req-2")
    cell.commit(run, 1, [8], end="stop")
    assert may_go(cell, retirement, staying), "that of the other one ends there"


def test_a_cpu_on_the_route_of_a_gpu_stays_too(cell: Cell) -> None:
    cell.agree(dead_after_s=3600)
    cell.worker("a")
    cell.worker("g", stage=1, numerics="n3", varies=True, device="gpu")
    run = cell.begin("a", [7])
    for name in ("a2", "b2"):
        cell.worker(name, stage=int(name == "b2"))
    retirement = Retirement(links_of(cell), MODEL, "a", split="1-2,3-4", folder=MODEL, numerics="n1")
    staying = replace(PLAN, split="1-2,3-4", assignments={"a": 0, "a2": 0, "b2": 1}, other_folders={"a2": "", "b2": ""})
    assert not may_go(cell, retirement, staying) and not may_go(cell, retirement, staying)
    cell.commit(run, 1, [8], end="stop")
    assert may_go(cell, retirement, staying)

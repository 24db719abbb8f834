"""A request with a grammar runs where the first and the last worker read grammars as its gateway does."""

from dataclasses import replace

from blockrelay.protocol.messages import RequestBody
from tests.support.cell import Cell, body

SPLIT = "1-2,3-4,5-6"


def following(grammar_id: str = "new") -> RequestBody:
    return replace(body(), grammar_id=grammar_id)


def worker(cell: Cell, name: str, stage: int, grammar: str = "") -> str:
    name = cell.worker(name, split=SPLIT, stage=stage)
    cell.client.hset(cell.keys.worker(name), "grammar", grammar)
    return name


def test_the_first_and_the_last_worker_decide(cell: Cell) -> None:
    worker(cell, "a0", 0, "new")
    worker(cell, "a1", 1)
    worker(cell, "a2", 2, "old")
    cell.accept(content=following())
    assert cell.claim("a0") == [], "the last stage reads other grammars"
    worker(cell, "b2", 2, "new")
    (run,) = cell.claim("a0")
    assert run.route == ("a0", "a1", "b2")


def test_others_are_not_held_up(cell: Cell) -> None:
    worker(cell, "a0", 0, "new")
    worker(cell, "a1", 1)
    worker(cell, "a2", 2)
    cell.accept("req-1", content=following())
    cell.accept("req-2")
    assert [run.request_id for run in cell.claim("a0")] == ["req-2"]


def test_a_worker_passes_over_grammars_that_it_does_not_read(cell: Cell) -> None:
    worker(cell, "old", 0, "old")
    worker(cell, "new", 0, "new")
    for stage in (1, 2):
        worker(cell, f"a{stage}", stage, "new")
    cell.accept(content=following())
    assert cell.claim("old") == []
    assert [run.route[0] for run in cell.claim("new")] == ["new"]


def test_no_request_waits_for_a_worker_that_reads_its_grammar_in_vain(cell: Cell) -> None:
    assert cell.accept("before", content=following()).status == "OK", "no worker is there yet"
    worker(cell, "a0", 0, "old")
    assert cell.accept("req-1", content=following()).status == "NO_GRAMMAR"
    assert cell.accept("req-2", content=following("old")).status == "OK"
    assert cell.accept("req-3").status == "OK"

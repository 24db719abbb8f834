"""The record of a request says which workers computed which of its tokens."""

from collections.abc import Sequence

import pytest

from blockrelay.protocol.records.ended import whole_record
from blockrelay.protocol.records.provenance import Ran, Stage, provenance
from blockrelay.protocol.transitions import calls
from blockrelay_launcher.cli.dead_letters import read_letters
from tests.support.cell import Cell

SPLIT = "1-12,13-24,25-36"
NUMERICS = "w8a8-3d9ab1d8214f0da5"


def told(cell: Cell, request_id: str = "req-1") -> list[Ran]:
    record = cell.client.hgetall(cell.keys.request(request_id))
    log = cell.client.xrange(cell.keys.log(request_id))
    whole = whole_record(record, log)  # pyright: ignore[reportArgumentType]
    return provenance(whole, int(whole[b"committed"]))


def workers(run: Ran) -> list[str]:
    return [stage.worker for stage in run.stages]


def three(cell: Cell, *names: str, numerics: Sequence[str] = (NUMERICS,) * 3) -> None:
    cell.agree(dead_after_s=3600)  # hundreds of runs may take longer than a worker without heartbeats lives
    for stage, name in enumerate(names):
        cell.worker(name, split=SPLIT, stage=stage, numerics=numerics[stage])
        cell.client.hset(cell.keys.worker(name), mapping={"epoch": 17})


def test_a_run_names_the_worker_of_each_stage(cell: Cell) -> None:
    three(cell, "a", "b", "c")
    run = cell.begin("a", [7, 8])
    stages = tuple(
        Stage(blocks, name, "cpu", 17, NUMERICS) for blocks, name in zip(SPLIT.split(","), "abc", strict=True)
    )
    assert told(cell) == [Ran(0, 2, 1, stages)]
    cell.commit(run, 2, [9], end="stop")
    assert told(cell) == [Ran(0, 3, 1, stages)], "also when it has ended"


def test_each_part_of_the_text_has_its_run(cell: Cell) -> None:
    three(cell, "a", "b", "c")
    run = cell.begin("a", [7, 8])
    cell.rerun(run, "preempted")
    (idle,) = cell.claim("a")
    cell.rerun(idle, "preempted")
    (run,) = cell.claim("a")
    cell.commit(run, 2, [9, 10])
    cell.rerun(run)
    (run,) = cell.claim("a")
    cell.commit(run, 4, [11], end="stop")
    found = [(ran.begin, ran.end, ran.attempt) for ran in told(cell)]
    assert found == [(0, 2, 1), (2, 4, 3), (4, 5, 4)], "the second run has committed nothing"


def test_stages_differ_in_what_they_differ(cell: Cell) -> None:
    cell.worker("g0", split="1-2,3-4,5-6", stage=0, device="gpu", numerics="g", varies=True)
    cell.worker("c1", split="1-2,3-4,5-6", stage=1, numerics="c")
    cell.worker("g2", split="1-2,3-4,5-6", stage=2, device="gpu", numerics="g", varies=True)
    cell.client.hset(cell.keys.worker("g2"), mapping={"device_id": "gpu:1", "epoch": 3})
    cell.begin("g0")
    (run,) = told(cell)
    assert run.stages == (
        Stage("1-2", "g0", "gpu", 0, "g"),
        Stage("3-4", "c1", "cpu", 0, "c"),
        Stage("5-6", "g2", "gpu:1", 3, "g"),
    )


def test_it_takes_little_memory(cell: Cell) -> None:
    names = [f"host-{stage}-12345-0a1b2c3d" for stage in range(3)]
    three(cell, *names)
    cell.begin(names[0], [7])
    assert len(cell.record()["ran"]) <= 300


@pytest.mark.parametrize("others", [0, 1])
def test_of_very_many_runs_the_oldest_are_forgotten(cell: Cell, others: int) -> None:
    three(cell, "a", "b", "c")
    cell.worker("d", split=SPLIT, numerics=NUMERICS)
    run = cell.begin("a", [7])
    for position in range(1, 300):
        cell.rerun(run)
        (run,) = cell.claim("d" if position % 2 * others else "a")
        cell.commit(run, position, [7])
    found = told(cell)
    assert len(cell.record()["ran"]) <= 1500
    assert found[0].begin > 0 and [ran.end for ran in found[:-1]] == [ran.begin for ran in found[1:]]
    assert found[-1].end == 300 and found[-1].attempt == 300
    firsts = [workers(ran)[0] for ran in found]
    assert firsts == ["d" if ran.begin % 2 * others else "a" for ran in found]
    assert all(workers(ran)[1:] == ["b", "c"] for ran in found)


def test_a_route_of_very_many_stages_is_kept(cell: Cell) -> None:
    split = ",".join(f"{block}-{block}" for block in range(1, 41))
    names = [f"a-host-with-a-long-name-{stage}" for stage in range(40)]
    for stage, name in enumerate(names):
        cell.worker(name, split=split, stage=stage, numerics=NUMERICS)
    cell.begin(names[0], [7])
    assert workers(told(cell)[0]) == names


def test_a_dead_letter_keeps_it_and_the_tokens(cell: Cell) -> None:
    three(cell, "a", "b", "c")
    run = cell.begin("a", [7, 8])
    meta = {"error": "x", "code": "row_not_finite"}
    cell.scripts.run(calls.finish("req-1", "error", meta=meta, run_id=run.run_id))
    (letter,) = read_letters(cell.client, cell.keys)
    assert letter.tokens == (7, 8) and letter.ran == told(cell)
    assert [workers(ran) for ran in letter.ran] == [["a", "b", "c"]]


@pytest.mark.parametrize("ended", [False, True])
def test_a_request_that_never_ran_has_none(cell: Cell, ended: bool) -> None:
    cell.accept()
    if ended:
        cell.scripts.run(calls.finish("req-1", "cancelled", meta={}))
    assert told(cell) == []

"""The first stage reads the records of other workers of a route, and keeps its batches within their limits."""

import json
from dataclasses import asdict, replace

import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.capabilities import Capabilities
from blockrelay.redis.registry import read_workers
from blockrelay_worker.scheduling.limits import BatchLimits
from blockrelay_worker.scheduling.route_members import RouteMembers
from blockrelay_worker.scheduling.step_cost import StepCost
from blockrelay_worker.transport.redis_links import Links
from tests.support.cell import MODEL, Cell
from tests.support.worker.first_stage import Stage
from tests.support.worker.links import links_of

ABLE = Capabilities(
    exact=True, ragged=True, max_rows=256, max_sequences=32, precision="w8a8", numerics_id="n1", kv_tokens=1600
)
LIMITS = BatchLimits(max_rows=128, max_sequences=64, ragged=True, drafts=True, step_share_s=1.0, chunk_s=5.0)
#: One more row costs nothing.
FREE_ROWS = StepCost(
    decode_s=0.01, prompt_token_s=0.001, by_tokens=dict.fromkeys((1, 2, 3, 4, 6, 8, 12, 16, 24, 32), 0.01)
)


@pytest.fixture
def links(cell: Cell) -> Links:
    return links_of(cell)


def test_a_batch_obeys_the_least_of_its_route() -> None:
    assert LIMITS.obeying([]) == LIMITS
    assert LIMITS.obeying([ABLE]) == replace(LIMITS, max_sequences=32)
    assert LIMITS.obeying([ABLE, replace(ABLE, max_rows=8, max_sequences=4)]) == replace(
        LIMITS, max_rows=8, max_sequences=4
    )
    rectangular = LIMITS.obeying([ABLE, replace(ABLE, ragged=False)])
    assert not rectangular.ragged and not rectangular.drafts
    assert not LIMITS.obeying([replace(ABLE, exact=False)]).drafts


def test_a_worker_registers_what_it_can_do_and_others_read_it(cell: Cell) -> None:
    cell.worker("new", capabilities=ABLE)
    cell.worker("old")
    assert {w.id: w.capabilities for w in read_workers(cell.client, cell.keys, MODEL)} == {"new": ABLE, "old": None}


@pytest.mark.parametrize(
    "record",
    [
        None,
        b"",
        b"rubbish",
        b"[]",
        b"{}",
        json.dumps(asdict(ABLE) | {"max_rows": "8"}).encode(),
        json.dumps(asdict(ABLE) | {"exact": 1}).encode(),
        json.dumps(asdict(ABLE) | {"kv_tokens": -1}).encode(),
    ],
)
def test_what_cannot_be_read_is_as_if_nothing_were_said(record: bytes | None) -> None:
    assert Capabilities.from_json(record) is None


def test_what_a_newer_worker_says_beside_is_passed_over() -> None:
    assert Capabilities.from_json(json.dumps(asdict(ABLE) | {"speed": 3}).encode()) == ABLE


def test_workers_that_are_gone_count_as_alone_on_their_hosts(links: Links) -> None:
    assert RouteMembers(links.read_worker, LIMITS).shape(frozenset({"gone", "too"})).groups == 2


def test_a_record_is_read_once() -> None:
    asked: list[str] = []

    def read(worker_id: str, fields: tuple[str, ...]) -> list[bytes | None]:
        asked.append(worker_id)
        return [b"h", b"2", b"1", ABLE.to_json().encode()]

    members = RouteMembers(read, LIMITS)
    for _ in range(3):
        assert members.shape(frozenset("ab")).limits.max_sequences == 32
    members.shape(frozenset("bc"))
    assert sorted(asked) == ["a", "b", "c"]


@pytest.fixture
def route(w8a8: BlockFolder, cell: Cell) -> Stage:
    """A first stage, and a second one that can do little."""
    stage = Stage(w8a8, cell, last=2)
    cell.client.hset(
        cell.keys.worker(stage.route[1]), "capabilities", replace(ABLE, max_rows=6, max_sequences=2).to_json()
    )
    for worker_id in stage.route:
        cell.client.hset(cell.keys.worker(worker_id), "threads", 2)  # one group: the limits show
    return stage


def test_the_first_stage_sends_no_more_rows_nor_requests_than_the_next_one_can_take(route: Stage) -> None:
    for name in "pqrs":
        route.run(name, [5, 6, 7], computed=2)
    assert [len(route.step()) for _ in range(2)] == [2, 0], "a second batch waits for the first one's tokens"
    prompt = route.run("long", [7] * 40, computed=0)
    for name in "pqrs":
        route.table.drop(name, name)
    work = route.step()
    assert [(item.run, item.rows) for item in work] == [(prompt, 6)]


def test_guesses_stay_within_the_rows_that_the_next_stage_can_take(route: Stage) -> None:
    route.run("p", [1, 2, 3, 4, 5, 6, 7, 8] * 3 + [1, 2], computed=25)
    for _ in range(4):
        for item in route.step(FREE_ROWS):
            assert item.rows <= 6
            assert item.run.first is not None
            item.run.first.drafts = tuple(item.tokens[1:])
            following = [*item.tokens[1:], item.tokens[0] % 8 + item.rows]
            item.run.learn(following[: item.rows])


def test_a_stage_that_is_not_ragged_gets_batches_of_equal_rows(w8a8: BlockFolder, cell: Cell) -> None:
    stage = Stage(w8a8, cell, last=2)
    cell.client.hset(cell.keys.worker(stage.route[1]), "capabilities", replace(ABLE, ragged=False).to_json())
    for n, length in enumerate((3, 9, 20, 40)):
        stage.run(f"prompt-{n}", [7] * length, computed=0)
        stage.run(f"decoding-{n}", [5, 6, 7], computed=2)
    served: set[str] = set()
    for _ in range(30):
        work = stage.step()
        assert len({item.rows for item in work}) <= 1 and all(item.drafts == 0 for item in work)
        served.update(item.run.request_id for item in work)
        for item in work:
            if item.samples:
                item.run.learn([8])
    assert len(served) == 8

"""The number of the protocol: who may join a cell, and records that say under which number they were written."""

import pytest
import redis

from blockrelay.errors import UsageError
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import EndEntry
from blockrelay.protocol.number import PROTOCOL
from blockrelay.redis import client as redis_link
from blockrelay.redis.client import Scripts
from blockrelay.redis.protocol_check import check_protocol
from tests.support.cell import Cell

LATER = PROTOCOL + 1


@pytest.fixture
def cell(client: redis.Redis, keys: Keys, scripts: Scripts) -> Cell:
    return Cell(client, keys, scripts)


def test_the_first_service_of_a_cell_writes_its_number_and_others_come_with_the_same(
    client: redis.Redis, keys: Keys
) -> None:
    check_protocol(client, keys, join=False)
    assert client.get(keys.protocol) is None, "who only looks writes nothing"
    for _ in range(2):
        redis_link.check_redis(client, "control Redis", cell=keys)
    assert client.get(keys.protocol) == b"%d" % PROTOCOL


@pytest.mark.parametrize("number", [LATER, PROTOCOL - 1, "what?"])
def test_with_another_number_nobody_joins(client: redis.Redis, keys: Keys, number: int | str) -> None:
    client.set(keys.protocol, number)
    for join in (True, False):
        with pytest.raises(UsageError, match=f"the cell 't' speaks protocol .*, and Blockrelay .* speaks {PROTOCOL}"):
            check_protocol(client, keys, join=join)
    assert client.get(keys.protocol) == str(number).encode()


def test_every_record_says_its_number(client: redis.Redis, keys: Keys, cell: Cell) -> None:
    cell.worker("w", split="1-4")
    cell.accept("req-1")
    (run,) = cell.claim("w")
    assert client.hget(keys.worker("w"), "v") == client.hget(keys.request("req-1"), "v") == b"%d" % PROTOCOL
    cell.commit(run, 0, [5], end="stop")
    assert client.hget(keys.request("req-1"), "v") == b"%d" % PROTOCOL, "also when it has ended"


def test_a_request_of_0_1_0_is_finished(client: redis.Redis, keys: Keys, cell: Cell) -> None:
    """Its record says no number."""
    cell.accept("req-1")
    client.hdel(keys.request("req-1"), "v")
    cell.worker("w", split="1-4")
    (run,) = cell.claim("w")
    assert cell.commit(run, 0, [5], end="stop").verdict == "OK"


def test_a_request_of_a_later_protocol_ends_and_says_why(client: redis.Redis, keys: Keys, cell: Cell) -> None:
    for name in ("req-1", "req-2"):
        cell.accept(name)
    client.hset(keys.request("req-1"), "v", LATER)
    cell.worker("w", split="1-4")
    assert [run.request for run in cell.claim("w")] == ["req-2"], "it holds up nobody"
    (end,) = cell.log("req-1")
    assert isinstance(end, EndEntry) and end.meta["code"] == "protocol"
    assert f"protocol {LATER}" in end.meta["error"]

"""The number of the protocol: who may join a cell, and records that say under which number they were written."""

import pytest
import redis

from blockrelay.errors import RedisRefused, UsageError
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
    client.delete(keys.protocol)
    check_protocol(client, keys, join=False)
    assert client.get(keys.protocol) is None, "who only looks writes nothing"
    for _ in range(2):
        redis_link.check_redis(client, "control Redis", cell=keys)
    assert client.get(keys.protocol) == b"%d" % PROTOCOL


@pytest.mark.parametrize("number", [str(LATER), f"2>{LATER}", f"{LATER}>{LATER + 1}", "what?", "0", "-1", "2>", ">3"])
def test_with_another_number_nobody_joins(client: redis.Redis, keys: Keys, number: str) -> None:
    client.set(keys.protocol, number)
    for join in (True, False):
        with pytest.raises(UsageError, match="the cell 't' speaks protocol"):
            check_protocol(client, keys, join=join)
    assert client.get(keys.protocol) == number.encode()


@pytest.mark.parametrize("number", ["1", "2", f"2>{PROTOCOL}", None])
def test_with_an_older_one_services_wait_and_people_are_told(
    client: redis.Redis, keys: Keys, number: str | None
) -> None:
    """None: release 0.1.0, which wrote no number."""
    if number is None:
        client.delete(keys.protocol)
        client.hset(keys.load("m"), "pages", 0)
    else:
        client.set(keys.protocol, number)
    with pytest.raises(
        RedisRefused, match=f"speaks protocol .*, and Blockrelay .* speaks {PROTOCOL}: waiting for"
    ) as it:
        check_protocol(client, keys, join=True)
    assert it.value.code == "PROTOCOL"
    with pytest.raises(UsageError, match=f"speaks {PROTOCOL}: start a scheduler of this release"):
        check_protocol(client, keys, join=False)
    assert client.get(keys.protocol) == (number and number.encode())
    client.delete(keys.load("m"))


def test_every_record_says_its_number(client: redis.Redis, keys: Keys, cell: Cell) -> None:
    cell.worker("w", split="1-4")
    cell.accept("req-1")
    (run,) = cell.claim("w")
    assert client.hget(keys.worker("w"), "v") == client.hget(keys.request("req-1"), "v") == b"%d" % PROTOCOL
    cell.commit(run, 0, [5], end="stop")
    assert client.hget(keys.request("req-1"), "v") == b"%d" % PROTOCOL, "also when it has ended"


def test_a_request_of_an_older_protocol_waits_for_a_scheduler(client: redis.Redis, keys: Keys, cell: Cell) -> None:
    """A gateway that had stood still since before an upgrade accepted it behind it (test_upgrade)."""
    for name in ("req-1", "req-2"):
        cell.accept(name)
    client.hset(keys.request("req-1"), "v", PROTOCOL - 1)
    cell.worker("w", split="1-4")
    assert [run.request for run in cell.claim("w")] == ["req-2"], "it holds up nobody"
    assert cell.queued() == ["req-1"] and cell.log("req-1") == []
    client.hset(keys.request("req-1"), "v", PROTOCOL)
    assert [run.request for run in cell.claim("w")] == ["req-1"]


def test_a_request_of_a_later_protocol_ends_and_says_why(client: redis.Redis, keys: Keys, cell: Cell) -> None:
    for name in ("req-1", "req-2"):
        cell.accept(name)
    client.hset(keys.request("req-1"), "v", LATER)
    cell.worker("w", split="1-4")
    assert [run.request for run in cell.claim("w")] == ["req-2"], "it holds up nobody"
    (end,) = cell.log("req-1")
    assert isinstance(end, EndEntry) and end.meta["code"] == "protocol"
    assert f"protocol {LATER}" in end.meta["error"]

"""The number of the protocol: who may join a cell, and records that say under which number they were written."""

import pytest
import redis

from blockrelay.errors import RedisRefused, UsageError
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import EndEntry, TokenEntry
from blockrelay.protocol.number import CELLS_PROTOCOL, LOWEST_PROTOCOL, NUMBERS, PROTOCOL
from blockrelay.protocol.transitions import calls
from blockrelay.redis import client as redis_link
from blockrelay.redis.client import Scripts
from blockrelay.redis.protocol_check import check_protocol, services_below
from blockrelay_scheduler.link import Link
from blockrelay_scheduler.upgrade import CellUpgrade
from tests.support.cell import MODEL, Cell

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


@pytest.mark.parametrize("number", ["1", "2", f"2>{PROTOCOL}", f"2>{LOWEST_PROTOCOL}", None])
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
        RedisRefused, match=f"speaks protocol .*, and Blockrelay .* speaks {NUMBERS}: waiting for"
    ) as it:
        check_protocol(client, keys, join=True)
    assert it.value.code == "PROTOCOL"
    with pytest.raises(UsageError, match=f"speaks {NUMBERS}: start a scheduler of this release"):
        check_protocol(client, keys, join=False)
    assert client.get(keys.protocol) == (number and number.encode())
    client.delete(keys.load("m"))


def test_every_record_says_its_number(client: redis.Redis, keys: Keys, cell: Cell) -> None:
    cell.worker("w", split="1-4")
    cell.accept("req-1")
    (run,) = cell.claim("w")
    assert client.hget(keys.request("req-1"), "v") == b"%d" % PROTOCOL
    assert client.hmget(keys.worker("w"), "v", "protocol") == [b"%d" % LOWEST_PROTOCOL, b"%d" % PROTOCOL]
    cell.commit(run, 0, [5], end="stop")
    assert client.hget(keys.request("req-1"), "v") == b"%d" % PROTOCOL, "also when it has ended"


def test_a_request_of_an_older_protocol_waits_for_a_scheduler(client: redis.Redis, keys: Keys, cell: Cell) -> None:
    """A gateway that had stood still since before an upgrade accepted it behind it (test_upgrade)."""
    for name in ("req-1", "req-2"):
        cell.accept(name)
    client.hset(keys.request("req-1"), "v", LOWEST_PROTOCOL - 1)
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


@pytest.fixture
def lower(client: redis.Redis, keys: Keys, cell: Cell) -> Cell:
    """A cell of the number before ours."""
    client.set(keys.protocol, LOWEST_PROTOCOL)
    return cell


def older_worker(client: redis.Redis, keys: Keys, name: str) -> None:
    """One that does not speak ours: its record does not say what it speaks."""
    client.hdel(keys.worker(name), "protocol")


def test_in_a_cell_of_the_number_before_we_do_what_that_says(client: redis.Redis, keys: Keys, lower: Cell) -> None:
    for join in (True, False):
        check_protocol(client, keys, join=join)
    lower.worker("w", split="1-4")
    lower.accept("req-1")
    (run,) = lower.claim("w")
    lower.commit(run, 0, [5])
    assert lower.log() == [TokenEntry(1, 5)], "services of that number take what else it says for log probabilities"
    lower.commit(run, 1, [], end="stop")
    assert client.hget(keys.request("req-1"), "v") == client.get(keys.protocol) == b"%d" % LOWEST_PROTOCOL
    binding = calls.Binding("name", 2)
    assert LOWEST_PROTOCOL < CELLS_PROTOCOL
    with pytest.raises(RedisRefused, match="knows no other cells") as refused:
        lower.scripts.run(calls.move(binding, retention_s=10))
    assert refused.value.code == "PROTOCOL" and not client.exists(keys.moved("name"))
    client.set(keys.protocol, PROTOCOL)
    assert not lower.scripts.run(calls.move(binding, retention_s=10))


def test_the_number_is_raised_when_nobody_is_left_who_speaks_the_lower_alone(
    client: redis.Redis, keys: Keys, lower: Cell, scripts: Scripts
) -> None:
    link = Link(client, client, keys, scripts)

    def look(*, raises: bool = True) -> int:
        CellUpgrade(link, MODEL, raises=raises).look()
        return int(client.get(keys.protocol) or 0)  # pyright: ignore

    lower.worker("old", split="1-4")
    lower.worker("new", split="1-4")
    older_worker(client, keys, "old")
    client.set(keys.gateway("old"), LOWEST_PROTOCOL, ex=15)
    client.set(keys.gateway("new"), PROTOCOL, ex=15)
    for name in ("before", "waits"):
        lower.accept(name)
    (run, _) = lower.claim("old")
    before = lower.everything()
    assert services_below(client, keys, PROTOCOL) == (["old"], ["old"])
    assert services_below(client, keys, LOWEST_PROTOCOL) == ([], [])
    assert look() == LOWEST_PROTOCOL
    client.delete(keys.gateway("old"))
    assert look() == LOWEST_PROTOCOL, "the worker is left"
    client.hset(keys.worker("old"), "protocol", PROTOCOL)
    assert look(raises=False) == LOWEST_PROTOCOL, "the operator keeps the way back"
    assert look() == PROTOCOL
    client.set(keys.protocol, LOWEST_PROTOCOL)
    older_worker(client, keys, "old")
    client.set(keys.gateway("old"), LOWEST_PROTOCOL, ex=15)
    changed = {name for name, content in lower.everything().items() if before.get(name) != content}
    assert changed == set(), "nothing but the number was"
    client.set(keys.protocol, PROTOCOL)
    lower.accept("after")
    assert lower.record("before")["v"] == f"{LOWEST_PROTOCOL}" and lower.record("after")["v"] == f"{PROTOCOL}"
    assert lower.commit(run, 0, [5], end="stop").verdict == "OK", "runs go on"
    assert [run.request for run in lower.claim("new")] == ["after"]


def test_raised_only_from_the_number_that_was_seen(client: redis.Redis, keys: Keys, scripts: Scripts) -> None:
    for number in (str(LATER), f"2>{LOWEST_PROTOCOL}", "2", str(PROTOCOL)):
        client.set(keys.protocol, number)
        assert not scripts.run(calls.raise_protocol(LOWEST_PROTOCOL))
        assert client.get(keys.protocol) == number.encode()
    client.delete(keys.protocol)
    assert not scripts.run(calls.raise_protocol(LOWEST_PROTOCOL)) and not client.exists(keys.protocol)

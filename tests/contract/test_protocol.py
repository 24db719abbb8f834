"""The number of the protocol: who may join a cell, and records that say under which number they were written."""

from typing import Any

import pytest
import redis

from blockrelay.errors import RedisRefused, UsageError
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import EndEntry
from blockrelay.protocol.number import LOWEST_PROTOCOL, NUMBERS, PROTOCOL
from blockrelay.protocol.transitions import calls, source
from blockrelay.protocol.transitions.calls import Call
from blockrelay.redis import client as redis_link
from blockrelay.redis.client import Scripts
from blockrelay.redis.protocol_check import check_protocol, services_below
from blockrelay_scheduler.link import SchedulerLinks
from blockrelay_scheduler.upgrade import CellUpgrade
from tests.support.cell import Cell, begin_cell

LATER = PROTOCOL + 1


def test_the_first_service_of_a_cell_writes_its_number_and_others_come_with_the_same(
    client: redis.Redis, keys: Keys
) -> None:
    client.delete(keys.protocol)
    check_protocol(client, keys, join=False)
    assert client.get(keys.protocol) is None, "who only looks writes nothing"
    for _ in range(2):
        redis_link.check_redis(client, "control Redis", cell=keys)
    assert client.get(keys.protocol) == b"%d" % PROTOCOL


@pytest.mark.parametrize("number", ["what?", "0", "-1", "2>", ">3", f"2>{PROTOCOL}", f"{PROTOCOL}.0"])
def test_in_a_cell_whose_number_is_none_nobody_joins(client: redis.Redis, keys: Keys, number: str) -> None:
    client.set(keys.protocol, number)
    for join in (True, False):
        with pytest.raises(UsageError, match=r"the cell 't' speaks protocol .*, which is not a number of Blockrelay's"):
            check_protocol(client, keys, join=join)
    assert client.get(keys.protocol) == number.encode()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        *((number, "finish its requests with a release that does, then use another cell") for number in (1, 2, 3)),
        (LATER, "run the release of its other services, or use another cell"),
    ],
)
def test_a_cell_of_another_number_is_refused_in_one_line_with_the_remedy(
    client: redis.Redis, keys: Keys, number: int, remedy: str
) -> None:
    client.set(keys.protocol, number)
    for join in (True, False):
        with pytest.raises(UsageError, match=f"speaks protocol {number}, and Blockrelay .* speaks {NUMBERS}: {remedy}"):
            check_protocol(client, keys, join=join)
    assert client.get(keys.protocol) == b"%d" % number


def test_a_cell_with_requests_and_no_number_is_refused(client: redis.Redis, keys: Keys, cell: Cell) -> None:
    """Nobody gives it a number under which its records would be misread."""
    cell.accept("req-1")
    client.delete(keys.protocol)
    for join in (True, False):
        with pytest.raises(UsageError, match=r"requests and no protocol number.*delete all its keys \(\{t\}:\*\)"):
            check_protocol(client, keys, join=join)
    CellUpgrade(SchedulerLinks(client, client, keys, cell.scripts)).look()
    assert client.get(keys.protocol) is None
    begin_cell(client)


def test_a_service_that_joins_while_another_looks_is_no_trouble(
    client: redis.Redis, keys: Keys, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look for a number and that for requests the first service has come, and a request."""
    number = client.get(keys.protocol)
    client.delete(keys.protocol)
    scan = client.scan_iter

    def scan_late(*args: Any, **options: Any) -> Any:
        client.set(keys.protocol, number)  # pyright: ignore[reportArgumentType]
        cell.accept("req-1")
        return scan(*args, **options)

    monkeypatch.setattr(client, "scan_iter", scan_late)
    check_protocol(client, keys, join=True)


def test_every_record_says_its_number(client: redis.Redis, keys: Keys, cell: Cell) -> None:
    cell.worker("w", split="1-4")
    run = cell.begin("w")
    assert client.hget(keys.request("req-1"), "v") == b"%d" % PROTOCOL
    assert client.hmget(keys.worker("w"), "v", "protocol") == [b"%d" % LOWEST_PROTOCOL, b"%d" % PROTOCOL]
    cell.commit(run, 0, [5], end="stop")
    assert client.hget(keys.request("req-1"), "v") == b"%d" % PROTOCOL, "also when it has ended"


@pytest.mark.parametrize("number", [LOWEST_PROTOCOL - 1, LATER])
def test_a_request_of_another_protocol_ends_and_says_why(
    client: redis.Redis, keys: Keys, cell: Cell, number: int
) -> None:
    """Such a request waited while the number of the cell was raised twice, or its record was edited by hand."""
    for name in ("req-1", "req-2"):
        cell.accept(name)
    client.hset(keys.request("req-1"), "v", number)
    cell.worker("w", split="1-4")
    assert [run.request_id for run in cell.claim("w")] == ["req-2"], "it holds up nobody"
    (end,) = cell.log("req-1")
    assert isinstance(end, EndEntry) and end.meta["code"] == "protocol"
    assert f"protocol {number}" in end.meta["error"]


def test_every_script_looks_first_whether_the_cell_is_ours(client: redis.Redis, keys: Keys, cell: Cell) -> None:
    for script in source.NAMES:
        assert source.source(script).parts[:2] == ("cell", source.FENCE), script
    cell.worker("w", split="1-4")
    for number in (None, LOWEST_PROTOCOL - 1, LATER, "what?"):
        if number is None:
            client.delete(keys.protocol)
        else:
            client.set(keys.protocol, number)
        before = cell.everything()
        refused: list[Call[Any]] = [
            calls.dead("w", silent_s=0),
            calls.forget(8),
            calls.claim("w", 8, free_pages=8),
            calls.upgrade(PROTOCOL, LATER),
        ]
        for call in refused:
            with pytest.raises(RedisRefused, match=f"the cell speaks .*, and this service speaks {NUMBERS}") as it:
                cell.scripts.run(call)
            assert it.value.code == "PROTOCOL", "a gateway says 503, and the client comes again"
        assert cell.everything() == before


def older(client: redis.Redis, keys: Keys, worker_id: str) -> None:
    """A worker and a gateway of this release: both say that they do not speak the number after ours."""
    client.hset(keys.worker(worker_id), "protocol", PROTOCOL)
    client.set(keys.gateway("old"), PROTOCOL, ex=15)


def test_the_next_release_raises_the_number_when_nobody_is_left_who_speaks_ours_alone(
    client: redis.Redis, keys: Keys, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = SchedulerLinks(client, client, keys, cell.scripts)

    def look(*, raises: bool = True) -> int:
        CellUpgrade(link, raises=raises, highest=LATER).look()
        return int(client.get(keys.protocol) or 0)  # pyright: ignore

    for name in ("old", "new"):
        cell.worker(name, split="1-4")
        client.hset(keys.worker(name), "protocol", LATER)
    older(client, keys, "old")
    client.set(keys.gateway("new"), LATER, ex=15)
    for name in ("before", "waits"):
        cell.accept(name)
    (run, _) = cell.claim("old")
    before = cell.everything()
    assert services_below(client, keys, LATER) == (["old"], ["old"])
    assert services_below(client, keys, PROTOCOL) == ([], [])
    assert look() == PROTOCOL
    client.delete(keys.gateway("old"))
    assert look() == PROTOCOL, "the worker is left"
    client.hset(keys.worker("old"), "protocol", LATER)
    assert look(raises=False) == PROTOCOL, "the operator keeps the way back"
    assert look() == LATER
    with pytest.raises(RedisRefused, match=f"the cell speaks protocol {LATER}"):
        cell.accept("late")  # by a service that speaks ours alone and was not seen
    client.set(keys.protocol, PROTOCOL)
    older(client, keys, "old")
    changed = {name for name, content in cell.everything().items() if before.get(name) != content}
    assert changed == set(), "nothing but the number was"

    client.set(keys.protocol, LATER)
    monkeypatch.setattr(source, "PROTOCOL", LATER)  # the scripts of the next release
    source.source.cache_clear()
    try:
        cell.scripts = type(cell.scripts)(client, keys)
        cell.accept("after")
        assert cell.record("before")["v"] == f"{PROTOCOL}" and cell.record("after")["v"] == f"{LATER}"
        assert cell.commit(run, 0, [5], end="stop").verdict == "OK", "runs go on"
        assert [run.request_id for run in cell.claim("new")] == ["after"]
    finally:
        source.source.cache_clear()


def test_the_number_is_raised_only_from_the_one_that_was_seen(
    client: redis.Redis, keys: Keys, scripts: Scripts
) -> None:
    assert not scripts.run(calls.upgrade(PROTOCOL - 1, LATER))
    assert client.get(keys.protocol) == b"%d" % PROTOCOL


def test_a_scheduler_gives_a_cell_whose_data_is_gone_its_number_and_leaves_others_alone(
    client: redis.Redis, keys: Keys, scripts: Scripts
) -> None:
    look = CellUpgrade(SchedulerLinks(client, client, keys, scripts)).look
    client.delete(keys.protocol)
    look()
    assert client.get(keys.protocol) == b"%d" % PROTOCOL
    for number in (b"what?", b"%d" % LATER, b"%d" % (LOWEST_PROTOCOL - 1)):
        client.set(keys.protocol, number)
        look()
        assert client.get(keys.protocol) == number, "left to the release that wrote it"

"""A scheduler brings the cell of an older release to our protocol: nothing is lost, wherever it dies, and nobody looks
at it in between."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from blockrelay import failpoints
from blockrelay.errors import RedisRefused, RedisUnavailable
from blockrelay.protocol.ended import body_of, decode_log
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import Commit
from blockrelay.protocol.number import PROTOCOL
from blockrelay.protocol.transitions import calls, source
from blockrelay.protocol.transitions.calls import Call
from blockrelay.redis.client import Scripts, check_redis
from blockrelay_scheduler import upgrade
from blockrelay_scheduler.link import Link
from blockrelay_scheduler.upgrade import CellUpgrade
from tests.support.cell import body
from tests.support.older_data import CELL, LEFT, name_of, restore
from tests.support.redis.redis_server import RedisServer
from tests.support.waiting import wait_until

KEYS = Keys(CELL)
OURS = b"%d" % PROTOCOL
#: Of records; what the scripts call a number is in `record.lua`, the rest is here.
NAMES = {
    "state", "run", "route", "class", "model", "job", "fallbacks", "numerics", "tenant", "share", "exact", "body",
    "notes", "end", "abandoned", "accepted_ms", "claimed_ms", "first_token_ms", "progress_ms", "fingerprint",
    "quarantined", "rerun_reason", "reruns",
}  # fmt: skip


MODEL = "0123456789abcdef"


def upgrade_cell(link: Link) -> None:
    """At once: nobody waits whether a service of the older protocol is only silent."""
    CellUpgrade(link, MODEL, margin_s=0).perform()


@pytest.fixture(params=LEFT, ids=name_of)
def link(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Link]:
    """A scheduler's connections to what an older release has left."""
    restore(request.param, tmp_path / "redis")
    server = RedisServer(tmp_path / "redis").start()
    with server.client() as client:
        yield Link(client, client, KEYS, Scripts(client, KEYS))
    server.stop()


def forget_gateways(client: redis.Redis) -> None:
    """As if 15 s had passed since they died."""
    for name in client.keys(KEYS.gateway("*")):  # pyright: ignore
        client.delete(name)


def everything(client: redis.Redis) -> dict[bytes, Any]:
    """The content of every key, without the order of what has none, and however the server keeps it."""
    found: dict[bytes, Any] = {}
    for name in cast("list[bytes]", client.keys("*")):
        kind = client.type(name)
        if kind == b"hash":
            found[name] = client.hgetall(name)
        elif kind == b"set":
            found[name] = client.smembers(name)
        elif kind == b"stream":
            found[name] = client.xrange(name)
        elif kind == b"zset":
            found[name] = client.zrange(name, 0, -1, withscores=True)
        else:
            found[name] = client.dump(name)
    return found


def numbers_of_records() -> set[str]:
    text = source.part_text("requests/record").partition("NUMBERS = {")[2].partition("\n}")[0]
    return {line.split(" = ")[0].strip() for line in text.splitlines() if " = " in line}


def test_the_keys_and_fields_are_ours_and_the_sums_right(link: Link) -> None:
    client, keys = link.client, link.keys
    before = {name: client.hgetall(name) for name in cast("list[bytes]", client.keys(keys.request("*")))}
    logs = {name: client.xrange(name) for name in cast("list[bytes]", client.keys(keys.log("*")))}
    queued = {name: client.dump(name) for kind in ("queue", "reruns", "pinned") for name in _all(client, kind)}
    forget_gateways(client)
    upgrade_cell(link)
    assert client.get(keys.protocol) == OURS
    for family in ("load", "of", "on", "trying", "fleet"):
        assert _all(client, family) == []
    expected, tenants = Counter[bytes](), Counter[bytes]()
    for name, old in before.items():
        new = cast("dict[bytes, bytes]", client.hgetall(name))
        assert {field.decode() for field in new if not field.isdigit()} <= NAMES | numbers_of_records()
        assert new[b"v"] == OURS and new[b"state"] == old[b"state"]
        kept = {field: value for field, value in cast("dict[bytes, bytes]", old).items() if field != b"v"}
        if new[b"state"] == b"running":
            kept[b"run"] = b""  # whoever has it still is of the older protocol
        assert sorted([*kept.values(), OURS]) == sorted(new.values()), "each other value"
        if new[b"state"] != b"done":
            left = int(new[b"max_tokens"]) - int(new[b"committed"])
            expected[new[b"state"] + b"_tokens"] += max(0, left)
            expected[new[b"state"] + b"_rows"] += int(new.get(b"rows_to_compute", 0))
            expected[b"pages"] += int(new[b"pages_needed"])
            tenants[new.get(b"tenant", b"")] += 1
    (totals,) = _all(client, "totals")
    assert client.hgetall(totals) == {b"accepted": b"%d" % sum(tenants.values())}, "older protocols kept no books"
    (sums,) = _all(client, "outstanding")
    assert {field: int(value) for field, value in client.hgetall(sums).items() if int(value)} == +expected  # pyright: ignore
    assert {name.rpartition(b":")[2]: client.scard(name) for name in _all(client, "tenant-requests")} == tenants
    assert {name: client.dump(name) for kind in ("queue", "reruns", "pinned") for name in _all(client, kind)} == queued
    for name, old in logs.items():
        new = cast("list[tuple[bytes, dict[bytes, bytes]]]", client.xrange(name))
        assert [entry for entry, _ in new] == [entry for entry, _ in cast(Any, old)]
        assert [list(fields.values()) for _, fields in new] == [list(fields.values()) for _, fields in cast(Any, old)]
        assert body_of(cast(Any, client.hgetall(name.replace(b":log:", b":request:"))), new).prompt.size
        decode_log(new)


def _all(client: redis.Redis, family: str) -> list[bytes]:
    return sorted(cast("list[bytes]", client.keys(f"{{{CELL}}}:{family}:*")))


def test_a_scheduler_that_dies_anywhere_is_followed_by_one_that_begins_again(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies before the first call, behind it, before the second..., and in the end all is as without a death."""
    monkeypatch.setattr(upgrade, "BATCH", 3)
    forget_gateways(link.client)
    before = {name: link.client.dump(name) for name in cast("list[bytes]", link.client.keys("*"))}
    upgrade_cell(link)
    expected, deaths = everything(link.client), 0
    for moment in ("before", "after"):
        for passage in range(1, 1000):
            link.client.flushall()
            for name, content in before.items():
                link.client.restore(name, 0, cast(bytes, content))
            failpoints.arm("scheduler", f"scheduler.{moment}_upgrade:raise@{passage}")
            try:
                upgrade_cell(link)
                break
            except RedisUnavailable:
                deaths += 1
                upgrade_cell(link)
                assert everything(link.client) == expected, (moment, passage)
            finally:
                failpoints.arm("scheduler", "")
    assert deaths > 8


def test_it_waits_until_those_of_the_older_release_are_gone(link: Link) -> None:
    client, keys = link.client, link.keys
    forget_gateways(client)
    seconds, _ = client.time()
    client.hset(keys.worker("old"), "model", "m")
    client.zadd(keys.workers, {"old": 1000 * seconds})
    before = everything(client)
    with pytest.raises(RedisRefused, match=r"stop all services of the older release.*worker old "):
        upgrade_cell(link)
    client.zadd(keys.workers, {"old": 1000 * seconds - 60_000})
    client.set(keys.gateway("old"), "", ex=15)
    with pytest.raises(RedisRefused, match=r"stop all services of the older release.*gateway old "):
        upgrade_cell(link)
    client.delete(keys.gateway("old"))
    client.zadd(keys.workers, {"old": 1000 * seconds})
    assert everything(client) == before, "nothing was done"
    client.zadd(keys.workers, {"old": 1000 * seconds - 60_000})
    upgrade_cell(link)
    assert client.get(keys.protocol) == OURS


def test_before_it_a_retry_is_refused_and_behind_it_found_again(link: Link) -> None:
    """Of a request with an Idempotency-Key and of a session's step: under older names no script of ours sees whose they
    are. A cell of 0.1.0 has no number that says so."""
    client, keys, scripts = link.client, link.keys, link.scripts
    request = min(name.decode().rpartition(":")[2] for name in _all(client, "request"))
    client.hset(keys.request(request), "fp", "its body")
    client.hset(keys.session("s"), mapping={"step": 1, "fp": "its step", "request": request, "length": 0})
    model = cast(bytes, client.hget(keys.request(request), "model")).decode()
    content = body()
    keyed = calls.accept(
        request, content, model=model, pages_needed=1, max_in_flight=100, fingerprint="its body", reader="g"
    )
    step = calls.SessionStep(session="s", step=1, fingerprint="its step", length=0, tokens=b"")
    stepped = calls.accept("req-new", content, model=model, pages_needed=1, max_in_flight=100, session=step)
    before = everything(client)
    refused: list[Call[Any]] = [keyed, stepped, calls.finish(request, "cancelled"), calls.forget(8)]
    for call in refused:
        with pytest.raises(RedisRefused, match="the cell speaks") as waits:
            scripts.run(call)
        assert waits.value.code == "PROTOCOL", "a gateway says 503, and the client comes again"
    assert everything(client) == before
    forget_gateways(client)
    upgrade_cell(link)
    assert scripts.run(keyed).status == "EXISTS"
    assert scripts.run(stepped) == calls.Accepted("REPEAT", request)


def test_while_it_lasts_nobody_joins_and_no_script_does_anything(link: Link) -> None:
    client, keys = link.client, link.keys
    link.scripts.run(calls.upgrade_begin(cast("bytes | None", client.get(keys.protocol))))
    with pytest.raises(RedisRefused, match="is being upgraded to") as waits:
        check_redis(client, "control Redis", cell=keys)
    assert waits.value.code == "PROTOCOL", "it waits"
    before = everything(client)
    refused: list[Call[Any]] = [calls.dead("w", silent_s=0), calls.forget(8), calls.claim("w", 8, free_pages=8)]
    for call in refused:
        with pytest.raises(RedisRefused, match="the cell speaks protocol"):
            link.scripts.run(call)
    assert everything(client) == before
    forget_gateways(client)
    upgrade_cell(link)
    check_redis(client, "control Redis", cell=keys)
    assert link.scripts.run(calls.upgrade_keys([])) is None, "somebody else has finished"
    assert not link.scripts.run(calls.upgrade_finish())


def test_every_script_looks_first_whether_the_cell_is_ours() -> None:
    for script in source.NAMES:
        assert (source.FENCE in source.parts_of(script)) == (script != source.UNFENCED)


def test_a_cell_of_ours_is_left_alone(client: redis.Redis, keys: Keys, scripts: Scripts) -> None:
    link = Link(client, client, keys, scripts)
    before = everything(client)
    upgrade_cell(link)
    assert everything(client) == before
    client.flushall()
    upgrade_cell(link)
    assert everything(client) == before == {keys.protocol.encode(): client.dump(keys.protocol)}, "a new one is ours"


def older_records(client: redis.Redis, keys: Keys, count: int) -> None:
    """Ended requests as protocol 2 wrote them, and the key by which that is known."""
    client.set(keys.protocol, 2)
    client.hset(keys.load(MODEL), "pages", 0)
    together = client.pipeline(transaction=False)
    for number in range(count):
        together.hset(keys.request(f"req-{number}"), mapping={"v": 2, "state": "done", "n": 1, "moved": 5})
    together.execute()


def left_behind(client: redis.Redis, keys: Keys) -> list[bytes]:
    names = cast("list[bytes]", client.keys(keys.request("*")))
    return [name for name in names if client.hget(name, "v") != OURS]


def test_a_redis_that_comes_back_in_the_middle_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its cursors are not those of the one before, and the client connects again without a word."""
    server = RedisServer(tmp_path / "redis").start()
    with server.client() as client:
        older_records(client, KEYS, 3000)
        scripts = Scripts(client, KEYS)
        run, seen = scripts.run, 0

        def run_and_restart(call: Call[Any]) -> Any:
            nonlocal seen
            seen += 1
            answer = run(call)
            if seen == 10:
                server.kill()
                server.start()
            return answer

        scripts.run = run_and_restart  # pyright: ignore[reportAttributeAccessIssue]
        with suppress(RedisUnavailable):
            upgrade_cell(Link(client, client, KEYS, scripts))
        upgrade_cell(Link(client, client, KEYS, Scripts(client, KEYS)))
        assert client.get(KEYS.protocol) == OURS and left_behind(client, KEYS) == []
    server.stop()


def test_what_has_gone_in_between_is_not_made_again(client: redis.Redis, keys: Keys, scripts: Scripts) -> None:
    client.set(keys.protocol, 2)
    scripts.run(calls.upgrade_begin(b"2"))
    names = [name.encode() for name in (keys.request("r"), keys.worker("w"), keys.session("s"), keys.log("r"))]
    assert scripts.run(calls.upgrade_keys([*names, keys.dead_letters.encode(), keys.load("m").encode()])) == 0
    assert client.keys("*") == [keys.protocol.encode()]


def test_who_has_stood_still_commits_nothing_behind_an_upgrade(link: Link) -> None:
    client, keys = link.client, link.keys
    names = cast("list[bytes]", client.keys(keys.request("*")))
    running = {name: client.hget(name, "run") for name in names if client.hget(name, "state") == b"running"}
    assert running
    forget_gateways(client)
    upgrade_cell(link)
    for name, run in running.items():
        request = name.decode().rpartition(":")[2]
        late = Commit(request=request, run=cast(bytes, run).decode(), position=0, tokens=(1,))
        assert link.scripts.run(calls.commit([late]))[0].verdict == "LOST"


def test_a_cell_that_falls_behind_is_upgraded_again(client: redis.Redis, keys: Keys, scripts: Scripts) -> None:
    """An older copy of the data was put back, or a gateway of an older release accepted something."""
    older_records(client, keys, 3)
    again = CellUpgrade(Link(client, client, keys, scripts), MODEL, margin_s=0)
    again.look()
    assert client.get(keys.protocol) == OURS and left_behind(client, keys) == []
    older_records(client, keys, 5)
    client.set(keys.protocol, OURS)
    client.set(keys.gateway("old"), "", ex=15)  # it lives, and nobody waits for it now
    again.look()
    assert client.get(keys.protocol) == OURS and left_behind(client, keys) == []
    assert not client.exists(keys.load(MODEL)) and client.exists(keys.outstanding(MODEL))
    before = everything(client)
    again.look()
    assert everything(client) == before
    for number in (b"what?", b"%d" % (PROTOCOL + 1)):
        client.set(keys.protocol, number)
        again.look()
        assert client.get(keys.protocol) == number, "left to whoever wrote it"
    for name in cast("list[bytes]", client.keys("*")):
        client.delete(name)


def test_a_scheduler_that_dies_behind_an_upgrade_is_followed_too(
    client: redis.Redis, keys: Keys, scripts: Scripts
) -> None:
    """The cell is marked as being brought from our protocol to ours: nobody takes that for a number of others."""
    older_records(client, keys, 5)
    client.set(keys.protocol, OURS)
    client.set(keys.gateway("old"), "", ex=15)
    failpoints.arm("scheduler", "scheduler.after_upgrade:raise")
    try:
        with pytest.raises(RedisUnavailable):
            CellUpgrade(Link(client, client, keys, scripts), MODEL).look()
    finally:
        failpoints.arm("scheduler", "")
    with pytest.raises(RedisRefused) as waits:
        check_redis(client, "control Redis", cell=keys)
    assert waits.value.code == "PROTOCOL"
    CellUpgrade(Link(client, client, keys, scripts), MODEL).perform()
    assert client.get(keys.protocol) == OURS and left_behind(client, keys) == []
    for name in cast("list[bytes]", client.keys("*")):
        client.delete(name)


def test_a_service_may_be_silent_for_a_while_before_it_is_taken_for_gone(
    client: redis.Redis, keys: Keys, scripts: Scripts
) -> None:
    """Redis has just come back: a worker of the older release has had no time to beat."""
    older_records(client, keys, 1)
    patient = CellUpgrade(Link(client, client, keys, scripts), MODEL, margin_s=0.2)
    with pytest.raises(RedisRefused, match="watching whether"):
        patient.perform()
    seconds, _ = client.time()
    client.hset(keys.worker("old"), "model", "m")
    client.zadd(keys.workers, {"old": 1000 * seconds})
    with pytest.raises(RedisRefused, match="worker old"):
        patient.perform()
    client.delete(keys.workers, keys.worker("old"))

    def is_upgraded() -> bool:
        with suppress(RedisRefused):
            patient.perform()
        return client.get(keys.protocol) == OURS

    assert not is_upgraded(), "the watch begins again"
    wait_until(is_upgraded, "the cell is upgraded")
    for name in cast("list[bytes]", client.keys("*")):
        client.delete(name)

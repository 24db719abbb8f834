"""Addresses that are looked up: what they say, what is refused, and that no message gives a secret away."""

import importlib.metadata
from collections.abc import Mapping
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from blockrelay.errors import RedisRefused, RedisTrouble, RedisUnavailable, UsageError
from blockrelay.protocol.keys import FAMILIES, Keys
from blockrelay.redis.address import LookedUpAddress, RedisNode, parse_address, shown
from blockrelay.redis.client import connect, connect_async
from blockrelay.redis.connections import checked_url
from blockrelay.redis.discovery import NOT_FOUND, Search, Sentinels, Slots, masters_of_slots, named_master

A, B, C = (RedisNode(host, 1) for host in "abc")


def parsed(url: str) -> LookedUpAddress:
    found = parse_address(url)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("url", "seeds", "name", "server"),
    [
        ("redis+sentinel://s/m", "s:26379", "m", "redis://x:1/0?"),
        ("redis+sentinel://s:5,[::1],t:7/my.master-1_x/3", "s:5 [::1]:26379 t:7", "my.master-1_x", "redis://x:1/3?"),
        ("rediss+sentinel://u:p%40@s/m?ssl_ca_certs=/x/y", "s:26379", "m", "rediss://u:p%40@x:1/0?ssl_ca_certs=%2Fx%2Fy"),
        ("redis+sentinel://s/m?db=2&socket_timeout=3", "s:26379", "m", "redis://x:1/2?socket_timeout=3"),
        ("redis+sentinel://:p@s/m?sentinel_password=q", "s:26379", "m", "redis://:p@x:1/0?"),
        ("redis+cluster://a,b:7/0", "a:6379 b:7", "", "redis://x:1/0?"),
        ("redis+cluster://a", "a:6379", "", "redis://x:1/0?"),
        ("rediss+cluster://u:p@a/?db=0&ssl_cert_reqs=none", "a:6379", "", "rediss://u:p@x:1/0?ssl_cert_reqs=none"),
    ],
)  # fmt: skip
def test_what_an_address_says(url: str, seeds: str, name: str, server: str) -> None:
    found = parsed(url)
    assert " ".join(map(str, found.seeds)) == seeds
    assert found.name == name and found.kind in url
    assert found.server_url(RedisNode("x", 1)) == server
    assert checked_url(url) == url


def test_sentinels_get_their_own_user_and_the_other_parameters() -> None:
    found = parsed(
        "rediss+sentinel://u:p@s/m/2?sentinel_username=v&sentinel_password=%40%2F&ssl_cert_reqs=none&username=w"
    )
    assert found.seed_url(found.seeds[0]) == "rediss://v:%40%2F@s:26379/?ssl_cert_reqs=none"
    assert parsed("redis+sentinel://u:p@s/m").seed_url(A) == "redis://a:1/?"
    assert "p@" not in repr(found) and "%40" not in repr(found)


def test_sentinels_and_servers_each_have_a_file_of_their_own_password() -> None:
    found = parsed("redis+sentinel://u@s/m?password_file=/a/b&sentinel_username=v&sentinel_password_file=/c")
    assert found.seed_url(found.seeds[0]) == "redis://v:@s:26379/?password_file=%2Fc"
    assert found.server_url(A) == "redis://u@a:1/0?password_file=%2Fa%2Fb"
    assert parsed("redis+sentinel://u@s/m?password_file=/a").seed_url(A) == "redis://a:1/?"
    cluster = parsed("redis+cluster://u@a/0?password_file=/a")
    assert cluster.seed_url(A) == cluster.server_url(A) == "redis://u@a:1/0?password_file=%2Fa"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis+sentinel:///m", "a host is missing"),
        ("redis+sentinel://a,,b/m", "a host is missing"),
        ("redis+sentinel://a,/m", "a host is missing"),
        ("redis+sentinel://a:26379", "the name that they know the master by"),
        ("redis+sentinel://a//0", "the name that they know the master by"),
        ("redis+sentinel://a/m m", "a name of letters"),
        ("redis+sentinel://a/m/0/1", "a name of letters"),
        ("redis+sentinel://a/m/x", "database is not a number"),
        ("redis+sentinel://a:0/m", "a number from 1 to 65535"),
        ("redis+sentinel://a:65536/m", "a number from 1 to 65535"),
        ("redis+sentinel://a:x/m", "a number from 1 to 65535"),
        ("redis+sentinel://a/m?sentinel_pasword=x", "unknown parameter 'sentinel_pasword'"),
        ("redis+sentinel://a/m?color=red", "unknown parameter 'color'"),
        ("redis+sentinel://a/m?socket_timeout=long", "Invalid value for 'socket_timeout'"),
        ("redis+sentinel://[::1/m", "its hosts cannot be read"),
        ("redis+cluster://", "a host is missing"),
        ("redis+cluster://a/1", "no database but 0"),
        ("redis+cluster://a/0?db=1", "no database but 0"),
        ("redis+cluster://a/0/0", "behind its hosts comes /0"),
        ("redis+cluster://a?sentinel_username=x", "unknown parameter 'sentinel_username'"),
        ("rediss+cluster://a?ssl_cert_reqs=perhaps", "cannot be read"),
        ("redis+sentinels://a/m", "begins with none of"),
        ("redis://a?color=red", "unknown parameter 'color'"),
        ("redis://u:p@a?password_file=/x", "it has a password and a password_file"),
        ("redis+cluster://a?password=p&password_file=/x", "it has a password and a password_file"),
        ("redis://a:99999", "cannot be read"),
        ("localhost:6379", "begins with none of"),
    ],
)
def test_what_is_refused(url: str, why: str) -> None:
    for use in (checked_url, lambda url: connect(url, cell="c0"), lambda url: connect_async(url, cell="c0")):
        with pytest.raises(UsageError) as caught:
            use(url)
        assert why in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:SECRET@host:x/0",
        "redis://user:SEC/RET@host/0?color=red",
        "redis://user:SEC?RET=@host/0",
        "redis://user:1?SECRET=x@host/0",
        "redis://user:SEC#RET@host:x",
        "redis://user:SEC\u2100RET@host/0",
        "http://SECRET:SECRET@host",
        "user:SECRET@host",
        "redis://host?color=red&password=SECRET",
        "redis+sentinel://user:SECRET@host",
        "redis+sentinel://user:SEC/RET@host/m",
        "redis+sentinel://host?sentinel_password=SECRET",
        "redis+sentinel://host?sentinel_password=x@SECRET",
        "redis+cluster://user:SECRET@host:x/0?password=SECRET",
    ],
)
def test_no_message_gives_a_secret_away(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        checked_url(url)
    assert not [part for part in ("SEC", "RET") if part in str(caught.value)], str(caught.value)
    assert "SEC" not in shown(url) and "RET" not in shown(url)


def test_all_keys_of_a_cell_are_in_its_slot() -> None:
    keys = Keys("some-cell")
    assert {key_slot(keys.sample(family.name).encode()) for family in FAMILIES} == {key_slot(b"{some-cell}")}


def test_a_cluster_wants_to_know_the_cell() -> None:
    with pytest.raises(ValueError, match="cell"):
        connect("redis+cluster://a")


# --- what follows from the answers ---


def state(place: RedisNode, epoch: int, *, down: bool = False, replaced: bool = False) -> dict[str, dict[str, Any]]:
    flags = "master" + ",o_down" * down + ",failover_in_progress" * replaced
    found = {"ip": place.host, "port": place.port, "config-epoch": epoch, "flags": flags}
    return {"m": {**found, "is_master": True, "is_sdown": down, "is_odown": down}}


@pytest.mark.parametrize(
    ("told", "place"),
    [
        ([state(A, 1)], A),
        ([state(A, 1), state(B, 2)], B),
        ([state(B, 2, down=True), state(A, 1)], None),
        ([state(A, 1, down=True), state(A, 1)], A),
        ([state(A, 1, replaced=True), state(A, 1)], None),
        ([state(A, 2, replaced=True), state(B, 2)], B),
        ([{}, state(A, 1)], A),
    ],
    ids=["one", "newest", "newest is down", "to one alone", "replaced", "replaced by", "one that knows nothing"],
)
def test_the_master_that_sentinels_name(told: list[dict[str, dict[str, Any]]], place: RedisNode | None) -> None:
    if place is None:
        with pytest.raises(RedisUnavailable):
            named_master("m", told)
    else:
        assert named_master("m", told) == place


def test_a_name_that_no_sentinel_knows() -> None:
    with pytest.raises(RedisRefused, match="know no master 'm'") as caught:
        named_master("m", [{}, {}])
    assert caught.value.code == NOT_FOUND


AWAY = RedisUnavailable("away")


def run(search: Search, answers: Mapping[RedisNode, Any]) -> tuple[RedisNode, list[RedisNode]]:
    """What a search finds, and whom it has asked."""
    asked = [next(search)]
    try:
        while True:
            asked.append(search.send(answers[asked[-1]]))
    except StopIteration as end:
        return end.value, asked


def test_more_than_half_of_the_sentinels_are_asked_and_the_silent_ones_last() -> None:
    sentinels = Sentinels([A, B, C], "m")
    answers = {A: AWAY, B: state(C, 1), C: state(C, 1)}
    assert run(sentinels.search(), answers) == (C, [A, B, C])
    assert run(sentinels.search(), answers) == (C, [B, C])
    assert run(sentinels.search(), {**answers, B: AWAY}) == (C, [B, C, A])


def test_what_a_witness_says_counts_unless_it_knows_less() -> None:
    sentinels = Sentinels([A, B, C], "m")
    run(sentinels.search(), dict.fromkeys((A, B, C), state(C, 2)))
    assert [sentinels.witness() for _ in range(4)] == [A, B, C, A]
    for answer, contradicts in (
        (state(C, 2), False),
        (state(B, 3), True),
        (state(B, 1), False),
        (state(C, 2, down=True), True),
        (state(C, 2, replaced=True), True),
        (state(B, 2, replaced=True), False),
        ({}, False),
    ):
        assert sentinels.contradicts(answer, C) == contradicts, answer


@pytest.mark.parametrize(
    ("places", "error"),
    [(Sentinels([A, B], "m"), "no Sentinel answers"), (Slots([A, B], 7), "no node of the cluster answers")],
)
def test_nobody_answers(places: Sentinels | Slots, error: str) -> None:
    with pytest.raises(RedisUnavailable, match=rf"{error} \(a:1 and 1 more\): away"):
        run(places.search(), {A: AWAY, B: AWAY})
    with pytest.raises(RedisRefused, match="said by b:1") as caught:
        run(places.search(), {A: AWAY, B: RedisRefused("no", code="NOPERM")})
    assert caught.value.code == "NOPERM"


def slots(*masters: tuple[int, int, object, int]) -> list[list[Any]]:
    return [[first, last, [host, port, b"id", []], [b"replica", 9, b"id", []]] for first, last, host, port in masters]


def test_the_owner_of_a_slot() -> None:
    answer = slots((0, 99, b"b", 1), (100, 200, None, 2), (201, 300, b"", 3), (301, 301, b"?", 4))
    assert list(masters_of_slots(answer, node=A).values()) == [
        B,
        RedisNode("a", 2),
        RedisNode("a", 3),
        RedisNode("a", 4),
    ]
    for slot, owner in ((0, B), (99, B), (100, RedisNode("a", 2)), (301, RedisNode("a", 4))):
        assert run(Slots([A], slot).search(), {A: answer}) == (owner, [A])
    with pytest.raises(RedisUnavailable, match="no node of the cluster owns slot 302"):
        run(Slots([A], 302).search(), {A: answer})


def test_every_master_is_asked_in_its_turn_also_when_all_seeds_are_gone() -> None:
    nodes = Slots([A], 7)
    answer = slots((0, 99, b"b", 1), (100, 200, b"c", 1))
    assert run(nodes.search(), {A: answer}) == (B, [A])
    assert run(nodes.search(), {B: answer}) == (B, [B])
    assert run(nodes.search(), {C: AWAY, A: AWAY, B: answer}) == (B, [C, A, B])


def test_a_node_that_is_no_master_any_more_is_forgotten_unless_it_is_a_seed() -> None:
    nodes = Slots([A], 7)
    run(nodes.search(), {A: slots((0, 99, b"b", 1))})
    assert run(nodes.search(), {B: slots((0, 99, b"c", 1))}) == (C, [B])
    with pytest.raises(RedisTrouble):
        run(nodes.search(), {A: AWAY, C: AWAY})


def test_a_connection_reads_no_metadata_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """For its version redis-py would, for every connection."""
    monkeypatch.setattr(importlib.metadata, "version", lambda _: 1 // 0)
    for make in (connect, connect_async):
        pool = make("redis://a").connection_pool
        connection = pool.connection_class(**pool.connection_kwargs)
        assert connection.driver_info is not None
        assert connection.driver_info.name == "redis-py" and connection.driver_info.lib_version == redis.__version__

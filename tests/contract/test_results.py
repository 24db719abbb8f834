"""Accounting of tensor results on a real server: what is promised to which tenant until when, and what is refused."""

import redis

from blockrelay.protocol.constants import RESULT_S
from blockrelay.protocol.messages import Claimed
from blockrelay.protocol.transitions import calls
from blockrelay.protocol.transitions.calls import Accepted, Limits
from tests.support.cell import Cell

LIMITS = Limits(result_bytes=1000, tenant_result_bytes=600)


def ask(cell: Cell, request_id: str, size: int = 400, *, tenant: str = "ada", limits: Limits = LIMITS) -> Accepted:
    return cell.accept(request_id, tenant=tenant, limits=limits, result_bytes=size)


def sums(client: redis.Redis, cell: Cell) -> dict[str, int]:
    """Bytes of all (''), and of each tenant behind a space."""
    found: dict[bytes, bytes] = client.hgetall(cell.keys.result_bytes)  # pyright: ignore[reportAssignmentType]
    return {name.decode(): int(value) for name, value in found.items() if name[:1] in (b"", b" ")}


def left_s(client: redis.Redis, cell: Cell, request_id: str) -> float:
    """Seconds until its result is off the books."""
    score = client.zscore(cell.keys.results, request_id)
    assert isinstance(score, float)
    return (score - cell.now_ms()) / 1000


def run(cell: Cell) -> list[Claimed]:
    cell.worker("w", split="1-4")
    return cell.claim("w")


def over(client: redis.Redis, cell: Cell) -> None:
    """The time of every result that has ended is over."""
    client.zadd(cell.keys.results, dict.fromkeys(client.zrangebyscore(cell.keys.results, 0, "(+inf"), 1))  # pyright: ignore


def test_what_is_promised_is_refused_to_others(client: redis.Redis, cell: Cell) -> None:
    assert ask(cell, "req-1").status == "OK"
    before = cell.everything()
    assert ask(cell, "req-2") == Accepted("TENANT_RESULTS", "400", retry_ms=1000)
    assert cell.everything() == before, "a refusal leaves nothing"
    assert ask(cell, "req-3", tenant="bob").status == "OK"
    assert ask(cell, "req-4", tenant="eve") == Accepted("RESULTS", "800", retry_ms=1000)
    assert ask(cell, "req-5", 0, tenant="eve").status == "OK", "tokens take nothing of it"
    assert ask(cell, "req-1", limits=Limits(result_bytes=1)).status == "EXISTS", "what was accepted is never refused"
    assert sums(client, cell) == {"": 800, " ada": 400, " bob": 400}


def test_rows_that_come_along_are_checked_with_the_first(client: redis.Redis, cell: Cell) -> None:
    both = Limits(result_bytes=1000, others=2, others_result_bytes=700)
    assert ask(cell, "req-1", limits=both).status == "RESULTS"
    assert ask(cell, "req-1", 300, limits=both).status == "OK"


def test_nobody_stores_what_nobody_has_claimed(client: redis.Redis, cell: Cell) -> None:
    ask(cell, "req-1")
    cell.scripts.run(calls.finish("req-1", "cancelled"))
    assert not client.exists(cell.keys.results, cell.keys.result_bytes)


def test_what_ends_is_promised_for_as_long_as_it_may_be_there(client: redis.Redis, cell: Cell) -> None:
    ask(cell, "req-1")
    ask(cell, "req-2", tenant="bob")
    (first, second) = run(cell)
    cell.commit(first, 0, [], end="tensor")
    cell.scripts.run(calls.finish(second.request_id, "cancelled"))  # its worker may have stored it, or will
    for request in ("req-1", "req-2"):
        assert RESULT_S - 5 < left_s(client, cell, request) <= RESULT_S
    refused = ask(cell, "req-3", tenant="eve")
    assert refused.status == "RESULTS" and 1000 < refused.retry_ms <= 1000 * RESULT_S
    over(client, cell)
    assert ask(cell, "req-3", tenant="eve").status == "OK"
    assert sums(client, cell) == {"": 400, " eve": 400}


def test_a_request_that_begins_anew_is_promised_once(client: redis.Redis, cell: Cell) -> None:
    ask(cell, "req-1")
    run(cell)
    cell.scripts.run(calls.finish("req-1", "cancelled", abandoned=True))
    assert ask(cell, "req-1", limits=Limits()).status == "OK"
    assert sums(client, cell) == {"": 400, " ada": 400}

"""One budget for bodies, what is parsed of them, and answers."""

import asyncio

import pytest

from blockrelay.errors import LimitExceeded, RequestTooLarge
from blockrelay_gateway.http.body_budget import BodyBudget, BodyShare
from blockrelay_gateway.policy import SMALL_BODY_BYTES

MIB = 1 << 20


def test_large_bodies_leave_room_for_others() -> None:
    budget = BodyBudget(16 * MIB)
    waiting = BodyShare(budget, large=True)
    waiting.take(8 * MIB)
    with pytest.raises(LimitExceeded):
        BodyShare(budget, large=True).take(1)
    with pytest.raises(LimitExceeded):
        BodyShare(budget).take(SMALL_BODY_BYTES + 1)
    small = BodyShare(budget)
    small.take(SMALL_BODY_BYTES)
    for share in (waiting, small, small):
        share.give_back()
    assert budget.used == 0


def test_the_largest_body_fits_into_any_budget() -> None:
    BodyShare(BodyBudget(1024, largest_body=8 * MIB), large=True, tenant="a").take(8 * MIB)


async def test_answers_come_one_after_the_other_where_there_is_no_room() -> None:
    budget = BodyBudget(16 * MIB)
    shares = [BodyShare(budget) for _ in range(4)]
    order: list[int] = []

    async def wait(number: int, mib: int) -> None:
        await shares[number].wait(mib * MIB, 60)
        order.append(number)

    waiting = [asyncio.create_task(wait(number, mib)) for number, mib in enumerate((10, 12, 12, 2))]
    for _ in range(3):
        await asyncio.sleep(0)
    assert order == [0], "a small one does not pass those before it"
    waiting[1].cancel()
    shares[0].give_back()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order == [0, 2, 3]
    for share in shares:
        share.give_back()
    assert budget.used == 0


async def test_what_never_fits_and_what_does_not_in_time_is_refused() -> None:
    budget = BodyBudget(16 * MIB)
    first, second = BodyShare(budget), BodyShare(budget)
    with pytest.raises(RequestTooLarge):
        await first.wait(15 * MIB, 60)
    await first.wait(14 * MIB, 60)
    with pytest.raises(LimitExceeded):
        await second.wait(1, 0.0)
    first.give_back()
    await second.wait(14 * MIB, 60)
    assert budget.used == 14 * MIB


async def test_a_tenant_has_half_of_what_waits_and_parsing_is_no_part_of_it() -> None:
    budget = BodyBudget(16 * MIB)
    own = BodyShare(budget, large=True, tenant="a")
    own.take(4 * MIB)
    with pytest.raises(LimitExceeded) as refused:
        BodyShare(budget, large=True, tenant="a").take(1)
    assert refused.value.scope == "client"
    BodyShare(budget, large=True, tenant="b").take(1 * MIB)
    own.give_back()
    await own.wait(6 * MIB, 60)
    BodyShare(budget, tenant="a").take(SMALL_BODY_BYTES)


async def test_what_one_key_has_parsed_keeps_no_body_of_others_out() -> None:
    budget = BodyBudget(16 * MIB)
    first, second = BodyShare(budget, large=True, tenant="a"), BodyShare(budget, large=True, tenant="b")
    first.take(2 * MIB)
    with pytest.raises(RequestTooLarge):
        first.check_parsed(6 * MIB)
    first.check_parsed(5 * MIB)
    await first.wait(5 * MIB, 60)
    second.take(4 * MIB)  # more than half of the budget are in use, and less than half of it waits
    BodyShare(budget, large=True).check_parsed(14 * MIB)
    for share in (first, second):
        share.give_back()
    assert (budget.used, budget.waiting) == (0, 0)

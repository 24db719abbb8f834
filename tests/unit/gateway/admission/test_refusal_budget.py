"""The budget of refusals: how many requests of a flood are read, and who shares in that."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from blockrelay.errors import LimitExceeded
from blockrelay_gateway.admission.refusal_budget import RefusalBudget
from blockrelay_gateway.policy import FULL_REFUSALS_AT_ONCE, FULL_REFUSALS_PER_S, LEAST_FULL_REFUSALS_PER_S


def refusal(message: str = "the queue is too long") -> LimitExceeded:
    return LimitExceeded(message, scope="cell", limit="wait")


def flood(budget: RefusalBudget, tenant: str, times: list[float], *, cost: float = 1) -> list[float]:
    """Has a request refused at each of these times unless it is refused unread; returns the times of those read."""
    read: list[float] = []
    for now in times:
        if budget.reason(tenant, now) is None:
            budget.charge(tenant, refusal(f"at {now}"), now, cost=cost)
            read.append(now)
    return read


def every(period: float, until: float, first: float = 0.0) -> list[float]:
    return [first + i * period for i in range(int((until - first) / period))]


def test_a_client_that_was_never_refused_is_read_whatever_others_do() -> None:
    budget = RefusalBudget()
    flood(budget, "ada", every(0.001, 5))
    assert budget.reason("ada", 5) is not None and budget.reason("bob", 5) is None


def test_the_last_refusal_is_repeated() -> None:
    budget = RefusalBudget()
    read = flood(budget, "ada", every(0.001, 1))
    reason = budget.reason("ada", read[-1])
    assert reason is not None and str(reason) == f"at {read[-1]}"


@pytest.mark.parametrize("cost", [1.0, 4.0])
def test_a_long_flood_costs_what_the_budget_has(cost: float) -> None:
    read = flood(RefusalBudget(), "ada", every(0.001, 60), cost=cost)
    assert (FULL_REFUSALS_AT_ONCE + 60 * FULL_REFUSALS_PER_S) / cost == pytest.approx(len(read), abs=2)


def test_clients_that_are_refused_together_share_the_budget() -> None:
    budget, read = RefusalBudget(), {"ada": 0, "bob": 0}
    for now in every(0.001, 60):
        for tenant in read:
            read[tenant] += len(flood(budget, tenant, [now]))
    for count in read.values():
        assert count == pytest.approx(FULL_REFUSALS_AT_ONCE + 60 * FULL_REFUSALS_PER_S / 2, rel=0.05)


def test_a_client_is_read_again_within_a_second_or_so_however_large_its_bodies_and_many_the_others() -> None:
    budget = RefusalBudget()
    for number in range(1000):
        budget.charge(f"tenant-{number}", refusal(), 0, cost=1e6)
    assert budget.reason("tenant-0", 0) is not None
    assert budget.reason("tenant-0", 1 / LEAST_FULL_REFUSALS_PER_S + 0.01) is None


def test_a_quiet_client_has_its_whole_budget_again() -> None:
    budget = RefusalBudget()
    flood(budget, "ada", every(0.001, 10))
    later = 10 + (FULL_REFUSALS_AT_ONCE + 1) / FULL_REFUSALS_PER_S
    assert len(flood(budget, "ada", [later] * 200)) == FULL_REFUSALS_AT_ONCE


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 0.2)), max_size=400))
def test_no_order_of_arrivals_has_more_read_than_the_budget(arrivals: list[tuple[str, float]]) -> None:
    budget, now, read = RefusalBudget(), 0.0, 0
    for tenant, wait in arrivals:
        now += wait
        read += len(flood(budget, tenant, [now]))
    assert read <= 3 * FULL_REFUSALS_AT_ONCE + now * (FULL_REFUSALS_PER_S + 3 * LEAST_FULL_REFUSALS_PER_S) + 3

"""The queue of first runs on a real server: no tenant waits for all of another's backlog, and no worker idles."""

from collections import defaultdict
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blockrelay.protocol.transitions import calls
from tests.support.cell import Cell, begin_cell, body

WEIGHTS = {"ada": 1.0, "bob": 1.0, "cyd": 2.5}
LONGEST = 200


@dataclass(frozen=True)
class Arrival:
    tenant: str
    tokens: int  # of the prompt; one more is generated
    priority: int
    claims: int  # behind it

    @property
    def cost(self) -> int:
        return self.tokens + 1


arrivals = st.lists(
    st.builds(
        Arrival,
        tenant=st.sampled_from(sorted(WEIGHTS)),
        tokens=st.integers(1, LONGEST - 1),
        priority=st.sampled_from([0, 0, 0, -1, 3]),
        claims=st.integers(0, 2),
    ),
    min_size=1,
    max_size=25,
)


@pytest.fixture
def cell(cell: Cell) -> Cell:
    cell.agree(dead_after_s=10**6)
    return cell


class Queue:
    """What is queued, as the test knows it, and what was claimed."""

    def __init__(self, cell: Cell) -> None:
        begin_cell(cell.client, cell.keys)
        self.cell = cell
        cell.worker("w", split="1-4", pages=10**6)
        self.waiting: dict[str, Arrival] = {}
        self.served: list[Arrival] = []
        self._count = 0

    def accept(self, one: Arrival) -> None:
        name = f"req-{self._count:04}"
        self._count += 1
        answer = self.cell.accept(
            name, tenant=one.tenant, priority=one.priority, weight=WEIGHTS[one.tenant],
            content=body([1] * one.tokens, max_tokens=1), limit=1000,
        )  # fmt: skip
        assert answer.status == "OK"
        self.waiting[name] = one

    def claim(self) -> Arrival | None:
        runs = self.cell.claim("w", 1, free=10**6)
        assert len(runs) == (1 if self.waiting else 0), "work conserving"
        if not runs:
            return None
        one = self.waiting[runs[0].request_id]
        earliest = min(waiting.priority for waiting in self.waiting.values())
        assert one.priority == earliest, "an earlier priority waits"
        mine = [name for name, w in self.waiting.items() if (w.tenant, w.priority) == (one.tenant, one.priority)]
        assert runs[0].request_id == min(mine), "a tenant's requests are served in their order"
        del self.waiting[runs[0].request_id]
        self.served.append(one)
        return one


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sequence=arrivals)
def test_any_sequence_is_served_completely_in_order_of_priority(cell: Cell, sequence: list[Arrival]) -> None:
    queue = Queue(cell)
    for one in sequence:
        queue.accept(one)
        for _ in range(one.claims):
            queue.claim()
    while queue.waiting:
        queue.claim()
    assert sorted(map(repr, queue.served)) == sorted(map(repr, sequence))
    assert cell.queued() == [] and queue.claim() is None


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(costs=st.lists(st.tuples(*[st.integers(1, LONGEST - 1)] * 3), min_size=4, max_size=12), cancels=st.booleans())
def test_who_waits_all_the_time_gets_its_weight(cell: Cell, costs: list[tuple[int, int, int]], cancels: bool) -> None:
    """Normalised service of any two tenants differs by at most one request of each, at every moment."""
    queue = Queue(cell)
    for several in costs:
        for tenant, tokens in zip(sorted(WEIGHTS), several, strict=True):
            queue.accept(Arrival(tenant, tokens, 0, 0))
    if cancels:  # what is taken back costs its tenant nothing
        for name in [name for name, one in queue.waiting.items() if one.tenant == "bob"]:
            cell.scripts.run(calls.finish(name, "cancelled"))
            del queue.waiting[name]
        for several in costs:
            queue.accept(Arrival("bob", several[0], 0, 0))
    service: defaultdict[str, float] = defaultdict(float)
    while {one.tenant for one in queue.waiting.values()} == set(WEIGHTS):
        one = queue.claim()
        assert one is not None
        service[one.tenant] += one.cost / WEIGHTS[one.tenant]
        for a in WEIGHTS:
            for b in WEIGHTS:
                bound = (LONGEST + 1) / WEIGHTS[a] + (LONGEST + 1) / WEIGHTS[b]
                assert abs(service[a] - service[b]) <= bound, (a, b)


@pytest.mark.parametrize("claimed", [0, 10])
def test_a_single_request_is_not_held_up_by_a_thousand_of_another(cell: Cell, claimed: int) -> None:
    queue = Queue(cell)
    for _ in range(200):
        queue.accept(Arrival("ada", 50, 0, 0))
    for _ in range(claimed):
        queue.claim()
    queue.accept(Arrival("bob", 50, 0, 0))
    served = [queue.claim() for _ in range(3)]
    assert "bob" in [one and one.tenant for one in served]


def test_idle_time_is_neither_saved_nor_paid_for(cell: Cell) -> None:
    queue = Queue(cell)
    for _ in range(5):
        queue.accept(Arrival("ada", 100, 0, 0))
        queue.claim()
    for _ in range(3):
        queue.accept(Arrival("ada", 10, 0, 0))
        queue.accept(Arrival("bob", 10, 0, 0))
    first_four = [queue.claim() for _ in range(4)]
    assert [one and one.tenant for one in first_four].count("ada") == 2, "five served requests are forgotten"

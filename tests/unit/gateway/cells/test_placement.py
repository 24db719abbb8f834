"""Which cells a request is offered to: those with its pages first, unless they have too much, or are away."""

import random
from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from blockrelay.auth.api_keys import ANYBODY, Tenant
from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.cells.placement import PREFIX_TOKENS, offers, prefix_name
from blockrelay_gateway.cells.rendezvous import ranked

EVEN = {"c0": 1, "c1": 1, "c2": 1}
ADA, BOB = Tenant(name="ada"), Tenant(name="bob")


def request(tokens: int, *, salt: str = "", last: int = 1) -> AdmissionRequest:
    params = SamplingParams(max_tokens=4, temperature=0.0)
    prompt = np.array([*range(tokens - 1), last], np.int32)
    return AdmissionRequest(
        request_id="req-1", body=RequestBody(prompt=prompt, params=params.to_dict(), salt=salt), params=params
    )


def test_requests_that_begin_alike_share_a_name_and_no_others() -> None:
    name = prefix_name(request(PREFIX_TOKENS + 1), ANYBODY)
    assert name == prefix_name(request(PREFIX_TOKENS + 1, last=2), ANYBODY) == prefix_name(request(1000), ANYBODY)
    others = {
        prefix_name(request(PREFIX_TOKENS, last=2), ANYBODY),
        prefix_name(request(PREFIX_TOKENS + 1, salt="s"), ANYBODY),
        prefix_name(request(PREFIX_TOKENS + 1), ADA),
        prefix_name(request(PREFIX_TOKENS + 1), BOB),
    }
    assert len(others) == 4 and name not in others and None not in others
    assert prefix_name(request(PREFIX_TOKENS - 1), ANYBODY) is None


def test_what_begins_alike_goes_where_its_pages_are_until_that_cell_has_too_much() -> None:
    order = ranked("prefix", EVEN)
    assert offers("prefix", EVEN, {}, set()) == (order[0], order)
    busy = {order[0]: 10, order[1]: 9, order[2]: 9}
    assert offers("prefix", EVEN, busy, set()).order == order, "a little more than the others"
    busy = {order[0]: 20, order[1]: 5, order[2]: 5}
    assert offers("prefix", EVEN, busy, set()) == (order[0], [order[1], order[2], order[0]])


def test_one_prefix_fills_all_cells_by_their_weights_in_the_end() -> None:
    """A system prompt that everybody sends would otherwise fill one cell and leave the others empty."""
    weights, loads = {"c0": 1, "c1": 1, "c2": 2}, Counter[str]()
    for _ in range(400):
        loads[offers("prefix", weights, loads, set()).order[0]] += 1
    for cell, weight in weights.items():
        assert loads[cell] / weight <= 1.25 * 400 / 4 + 1


@pytest.mark.parametrize("prefix", ["prefix", None])
def test_cells_that_are_away_come_last(prefix: str | None) -> None:
    for away in EVEN:
        for _ in range(20):
            assert offers(prefix, EVEN, {}, {away}).order[-1] == away
    assert sorted(offers(prefix, EVEN, {}, set(EVEN)).order) == sorted(EVEN), "all: each may be back"


@pytest.mark.parametrize("prefix", ["prefix", None])
def test_cells_without_workers_come_before_those_that_are_away(prefix: str | None) -> None:
    for away, idle in permutations(EVEN, 2):
        assert offers(prefix, EVEN, {}, {away}, {idle}).order[1:] == [idle, away]
    assert offers("prefix", EVEN, {}, (), set(EVEN)).order == ranked("prefix", EVEN), "all: each may get some"


def test_short_prompts_go_to_the_lesser_loaded_of_two_that_are_drawn() -> None:
    loads, chance = Counter({"c0": 0, "c1": 300, "c2": 0}), random.Random(7)
    for _ in range(300):
        loads[offers(None, EVEN, loads, set(), chance=chance).order[0]] += 1
    assert loads["c1"] == 300, "of two, it never has less"
    assert abs(loads["c0"] - loads["c2"]) <= 4

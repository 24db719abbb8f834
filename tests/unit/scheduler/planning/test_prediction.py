"""Predicted seconds of a step, compared with sums by hand."""

from dataclasses import replace

import pytest

from blockrelay.planning.profile import Hop, StepOverhead
from blockrelay_scheduler.planning.prediction import predict
from blockrelay_scheduler.planning.problem import Part, Placement
from tests.support.plan_problems import device, problem

#: A step of a block takes 1 s, and 0.1 s more for each row beyond the first, on either class.
SECONDS = {name: [{1: 1.0, 11: 2.0}] * 4 for name in ("CPU", "GPU")}
HOP = Hop(seconds=0.25, seconds_per_byte=0.0)


def placed(*parts: tuple[int, int, tuple[str, ...]]) -> Placement:
    return Placement(parts=tuple(Part(first=a, last=b, devices=on, reason="") for a, b, on in parts))


def test_one_stage_takes_its_blocks() -> None:
    found = predict(problem([device("c")], SECONDS), placed((1, 4, ("c",))), 6)
    assert found.seconds == pytest.approx(4 * 1.5)
    assert found.tokens_per_second == pytest.approx(1.0)


def test_one_request_goes_through_all_stages_and_hops() -> None:
    devices = [device("c"), device("g", "GPU")]
    found = predict(problem(devices, SECONDS, hop=HOP), placed((1, 2, ("c",)), (3, 4, ("g",))), 1)
    assert found.seconds == pytest.approx(4.0 + 0.25 + 0.25), "two stages, the rows' hop and the tokens' way back"


def test_stages_on_their_own_resources_work_at_once_on_half_the_requests_each() -> None:
    devices = [device("c"), device("g", "GPU")]
    found = predict(problem(devices, SECONDS), placed((1, 3, ("c",)), (4, 4, ("g",))), 12)
    assert found.seconds == pytest.approx(2 * 3 * 1.5), "the busier one has both groups of six"


def test_a_long_way_is_what_a_step_waits_for() -> None:
    devices = [device("c"), device("g", "GPU")]
    found = predict(
        problem(devices, SECONDS, hop=Hop(seconds=9.0, seconds_per_byte=0)), placed((1, 2, ("c",)), (3, 4, ("g",))), 12
    )
    assert found.seconds == pytest.approx(4 * 1.5 + 18.0)


def test_cpu_stages_of_one_host_take_turns_with_the_whole_batch() -> None:
    devices = [device("a", host="h"), device("b", host="h")]
    found = predict(problem(devices, SECONDS), placed((1, 2, ("a",)), (3, 4, ("b",))), 6)
    assert found.seconds == pytest.approx(4 * 1.5), "as one stage: no group reads the weights twice"


def test_replicas_share_the_requests() -> None:
    devices = [device("g0", "GPU"), device("g1", "GPU")]
    found = predict(problem(devices, SECONDS), placed((1, 4, ("g0", "g1"))), 12)
    assert found.seconds == pytest.approx(4 * 1.5)


def test_what_a_step_takes_beside_is_added() -> None:
    given = problem([device("c")], {"CPU": [{1: 1.0}]})
    assert given.costs.profile is not None
    profile = replace(given.costs.profile, step=StepOverhead(seconds=0.5, seconds_per_row=0.125))
    found = predict(replace(given, costs=replace(given.costs, profile=profile)), placed((1, 1, ("c",))), 4)
    assert found.seconds == pytest.approx(1.0 + 0.5 + 4 * 0.125)

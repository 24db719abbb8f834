"""How `bench.scenarios.capacity` divides counters among requests, tokens and COMMITs, with invented counters."""

import random

import pytest

from bench.scenarios.capacity import CAUSES, Growth, shared_out

COSTS = {"request": 90.0, "token": 2.5, "prompt_token": 0.5, "commit": 8.0}
A_SECOND = 100.0


def seen(requests: int, prompt: int, new: int, commits: int, *, off: float = 0.0) -> Growth:
    causes = {"request": float(requests), "token": float(requests * new), "prompt_token": float(requests * prompt)}
    amounts = {**causes, "commit": float(commits)}
    commands = sum(COSTS[cause] * amounts[cause] for cause in CAUSES) * (1 + off)
    return Growth(
        seconds=5.0,
        causes=causes,
        grew={"scripts": 5 + 2 * requests + commits, "commands": commands + 5 * A_SECOND, "quiet": 0.0},
    )


IDLE = Growth(seconds=2.0, causes={}, grew={"scripts": 2, "commands": 2 * A_SECOND, "quiet": 0.0})
LOADS = (
    (100, 32, 2, 210),
    (20, 32, 96, 1900),
    (300, 32, 2, 80),
    (90, 32, 96, 560),
    (80, 384, 2, 60),
    (60, 384, 64, 900),
)


def test_costs_come_out_as_they_went_in() -> None:
    found = shared_out(IDLE, [seen(*load) for load in LOADS])
    assert {cause: found["commands"][cause] for cause in CAUSES} == pytest.approx(COSTS)
    assert found["commands"]["a_second"] == A_SECOND
    assert found["commands"]["worst_error"] < 1e-9
    assert all(found["quiet"][cause] == 0 for cause in CAUSES)


def test_what_was_counted_with_errors_is_off_by_no_more() -> None:
    chance = random.Random(3)
    found = shared_out(IDLE, [seen(*load, off=chance.uniform(-0.02, 0.02)) for load in LOADS])
    assert found["commands"]["worst_error"] < 0.05
    assert found["commands"]["request"] == pytest.approx(COSTS["request"], rel=0.25)
    assert all(found["commands"][cause] >= 0 for cause in CAUSES)

"""Whether a draft model guesses, on a simulated clock: never slower than without by more than trials may lose."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from blockrelay_worker.speculation.gain import Prices, best_count, expected_gain, tokens_a_step
from blockrelay_worker.speculation.trials import (
    BASE_STEPS,
    FIRST_BUDGET_S,
    LONGEST_WINDOW,
    LOSS_SHARE,
    PATIENCE,
    Course,
    Interval,
    Phase,
    begun,
    left,
    observed,
)


@dataclass
class Machine:
    """One request that decodes: `step_s` a step, `call_s` for each guess of every token, `row_s` for each verified."""

    right: Callable[[float], float]
    """Probability that a guess is right, by the time."""
    step_s: float = 0.02
    call_s: float = 0.002
    row_s: float = 0.0005
    noise: float = 0.0
    """Standard deviation of a step's time, as a share."""
    source: random.Random = field(default_factory=lambda: random.Random(5))
    now: float = 0.0
    tokens: int = 0
    guessing_s: float = 0.0
    course: Course = field(default_factory=Course)

    @property
    def prices(self) -> Prices:
        steps = {k: 1 + k * self.row_s / self.step_s for k in range(1, 9)}
        return Prices(call=self.call_s / self.step_s, steps=steps)

    def step(self) -> None:
        self.course = begun(self.course, self.prices, step_s=self.step_s, catch_up_s=0.0)
        guesses, right = self.course.guesses, 0
        while right < guesses and self.source.random() < self.right(self.now):
            right += 1
        exact = self.step_s + guesses * (self.call_s + self.row_s)
        seconds = exact * max(0.5, self.source.gauss(1, self.noise))
        self.now += seconds
        self.tokens += 1 + right
        self.guessing_s += seconds if guesses else 0.0
        interval = Interval(
            tokens=1 + right,
            seconds=seconds,
            guessed=guesses,
            right=right,
            judged=min(guesses, right + 1),
        )
        self.course = observed(self.course, interval, self.prices)

    def leave(self, phase: Phase) -> None:
        """Goes on until this phase is over."""
        while self.course.phase == phase:
            self.step()

    def run_for(self, seconds: float) -> float:
        """Returns the pace of tokens as a multiple of that without guesses."""
        began, tokens = self.now, self.tokens
        while self.now - began < seconds:
            self.step()
        return (self.tokens - tokens) * self.step_s / (self.now - began)


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("right", [0.0, 0.2, 0.3])
def test_guesses_that_do_not_pay_cost_less_than_a_hundredth(right: float, noise: float) -> None:
    for seed in range(3):
        machine = Machine(lambda now: right, call_s=0.01, noise=noise, source=random.Random(seed))
        paces = [machine.run_for(60) for _ in range(4)]
        # The mean of a noisy clock is off by this much with three sigma.
        off = 3 * noise / (60 / machine.step_s) ** 0.5
        assert paces[0] > 0.99 - off
        assert paces[-1] > 0.995 - off, "trials become rare"


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("gain", [0.97, 0.99, 1.01])
def test_guesses_that_nearly_pay_cost_nothing_to_speak_of(gain: float, noise: float) -> None:
    """A middling draft on a fast tiny model: its calls cost about what right guesses bring."""
    machine = Machine(lambda now: 0.7, step_s=0.001, row_s=0.0001, noise=noise)
    # The best number of guesses of such a draft gains this much.
    low, high = 0.0, 1e-3
    for _ in range(60):
        machine.call_s = (low + high) / 2
        best = expected_gain(0.7, best_count(0.7, machine.prices), machine.prices)
        low, high = (low, machine.call_s) if best < gain else (machine.call_s, high)
    assert machine.run_for(10) > 0.99 - 3 * noise / (10 / machine.step_s) ** 0.5


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.2])
def test_a_draft_that_is_mostly_right_makes_it_faster(noise: float) -> None:
    machine = Machine(lambda now: 0.9, noise=noise)
    machine.run_for(60)  # until it has found out
    assert machine.course.phase in ("with", "check")
    possible = expected_gain(0.9, best_count(0.9, machine.prices), machine.prices)
    assert possible > 2
    assert machine.run_for(60) > 0.8 * possible, "a check costs the gain of an eighth of the time, if all goes well"


def test_the_first_trial_waits_until_what_it_may_lose_is_saved() -> None:
    machine = Machine(lambda now: 0.0, call_s=0.005)
    machine.leave("without")
    above = 6 * 2 * (machine.call_s + machine.row_s)
    assert machine.now == pytest.approx((above - FIRST_BUDGET_S) / LOSS_SHARE, rel=0.1)
    machine.leave("probe")
    assert machine.course.failures == 1 and machine.course.guesses == 0
    first = machine.now
    machine.leave("without")
    assert machine.now - first > 2 * first, "the next one waits for longer"


def test_guesses_end_when_they_pay_no_longer_and_begin_again_when_they_do() -> None:
    machine = Machine(lambda now: 0.0 if 100 < now < 200 else 0.9)
    assert machine.run_for(100) > 1.2
    assert machine.run_for(20) > 0.9, "what a part of a window loses"
    assert machine.course.phase == "without"
    assert machine.run_for(80) > 0.99
    machine.run_for(200)
    assert machine.course.phase in ("with", "check")


def test_a_draft_model_that_could_not_pay_if_all_were_right_is_never_tried() -> None:
    machine = Machine(lambda now: 1.0, call_s=0.02)
    machine.run_for(100)
    assert machine.guessing_s == 0


def test_every_window_with_guesses_is_followed_by_a_check_without_and_they_grow() -> None:
    machine, phases = Machine(lambda now: 1.0), list[str]()
    windows: list[int] = []
    for _ in range(8000):
        machine.step()
        if phases and phases[-1] == "with" and machine.course.phase == "check":
            windows.append(machine.course.with_.steps)
        phases.append(machine.course.phase)
    assert windows[:3] == [16, 32, 64] and windows[-1] == LONGEST_WINDOW
    assert {"probe", "trial", "with", "check"} < set(phases)
    assert phases.count("check") < 0.15 * phases.count("with")


def test_a_trial_without_guesses_is_given_up_and_charges_what_catching_up_took() -> None:
    course = Course(phase="probe", guesses=2, base_s=0.01, budget_s=0.5)
    free = Prices(call=0.0)
    course = observed(course, Interval(tokens=1, seconds=0.1, guessed=2, catch_up_s=0.09), free)
    assert course.budget_s == pytest.approx(0.41) and course.now.steps == 0
    for _ in range(PATIENCE):
        assert course.phase in ("probe", "without")
        course = observed(course, Interval(tokens=1, seconds=0.01), free)
    assert course.phase == "without" and course.guesses == 0 and course.failures == 0


def test_leaving_a_level_voids_a_trial_and_keeps_guesses_that_pay() -> None:
    trial = left(Course(phase="trial", guesses=3, base_s=0.01, failures=2))
    assert (trial.phase, trial.guesses, trial.base_s, trial.failures) == ("without", 0, None, 2)
    paying = left(Course(phase="with", guesses=3, base_s=0.01))
    assert (paying.phase, paying.guesses) == ("with", 3)
    assert begun(trial, Prices(call=0.0), step_s=0.01, catch_up_s=0.0) == trial, "no pace to compare with"


def test_a_probe_waits_for_the_seconds_that_catching_up_costs() -> None:
    ready = Course(base_s=0.01, budget_s=0.1)
    cheap = Prices(call=0.01)
    assert begun(ready, cheap, step_s=0.01, catch_up_s=0.05).phase == "probe"
    assert begun(ready, cheap, step_s=0.01, catch_up_s=0.2).phase == "without"


def test_the_pace_without_guesses_is_measured_in_parts() -> None:
    course = Course()
    for _ in range(BASE_STEPS - 1):
        course = observed(course, Interval(tokens=2, seconds=0.01), Prices(call=0.0))
    assert course.base_s is None
    course = observed(course, Interval(tokens=2, seconds=0.01), Prices(call=0.0))
    assert course.base_s == pytest.approx(0.005)


def test_the_number_of_guesses_follows_their_price_and_luck() -> None:
    free = Prices(call=0.0)
    assert best_count(1.0, free) == 8 and tokens_a_step(1.0, 8) == 9
    assert tokens_a_step(0.5, 2) == pytest.approx(1.75)
    dear = Prices(call=0.3, steps={k: 1 + 0.1 * k for k in range(1, 9)})
    assert best_count(0.2, dear) == 1 and expected_gain(0.2, 1, dear) < 1
    assert best_count(0.95, Prices(call=0.1)) > best_count(0.6, Prices(call=0.1)) > 1

"""Guesses for the first stage's batches: asks the draft model where that pays, and never lets it do harm."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from blockrelay.observability.logs import get
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.constants import MAX_DRAFTS
from blockrelay_worker.runs.run import Run
from blockrelay_worker.scheduling.step_cost import StepCost, size_of
from blockrelay_worker.speculation.draft_model import LONGEST_CALL_S, DraftModel
from blockrelay_worker.speculation.gain import Prices
from blockrelay_worker.speculation.trials import (
    BASE_STEPS,
    Course,
    Interval,
    begun,
    has_hope,
    is_due,
    left,
    observed,
    remeasured,
)

T = TypeVar("T")

#: Share of the time that the rest of a request should take which the draft model may take to compute its prompt.
WORTH_SHARE = 0.05


class DraftGuesser:
    """The guesses of a draft model. Implements `scheduling.guesses.Guesser`. Used by the engine thread only.

    Each level of load (runs that decode, rounded down to one of SIZES) has a course of its own. An error of the draft
    model ends all guesses, with one line in the log; the served model goes on without.
    """

    def __init__(
        self,
        model: DraftModel,
        metrics: WorkerMetrics,
        *,
        fixed: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`fixed`: this number of guesses for each run in each step, whatever they cost; None: as many as pay."""
        self._model: DraftModel | None = model
        self._metrics, self._fixed, self._clock = metrics, fixed, clock
        self._courses: dict[int, Course] = {}
        self._level = 0
        self._prices = Prices(call=1.0)
        # The interval that goes on since the last step: its begin (None: there is none), its runs and their tokens.
        self._began: float | None = None
        self._seen: list[tuple[Run, int]] = []
        self._steps = self._guessed = self._right = self._judged = 0
        self._catch_up_s = 0.0
        # Steps that nothing is done for while these runs stay: without guesses, until a pace is known.
        self._quiet_steps = 0
        self._quiet_runs: Sequence[Run] = ()

    @property
    def courses(self) -> dict[int, Course]:
        """The course of each level of load."""
        return self._courses

    def look(self, runs: Sequence[Run]) -> None:
        """Judges guesses, and frees pages of runs that have gone."""
        if not self._is_quiet(runs):
            self._safely(lambda model: self._look(model, runs), None)

    def count(self, runs: Sequence[Run], cost: StepCost) -> int:
        """Returns how many tokens to guess for each run of the next batch (`Guesser.count`)."""
        if self._is_quiet(runs):
            self._quiet_steps -= 1
            self._steps += 1
            return 0
        return self._safely(lambda model: self._count(model, runs, cost), 0)

    def guess(self, asked: Sequence[tuple[Run, int]]) -> list[list[int]]:
        """Returns guesses for each run; none for one whose prompt the draft model does not know yet."""
        return self._safely(lambda model: self._guess(model, asked), [[] for _ in asked])

    def interrupt(self) -> None:
        """Drops the interval that goes on: its time says nothing about guesses."""
        self._began = None

    def close(self) -> None:
        """Frees the memory of the draft model."""
        model, self._model = self._model, None
        if model is not None:
            model.clear()

    def _is_quiet(self, runs: Sequence[Run]) -> bool:
        """Whether nothing has to be done before this step.

        A step of a small model takes a millisecond: looking closely each time would cost some of it.
        """
        return self._quiet_steps > 1 and self._began is not None and runs == self._quiet_runs

    def _safely(self, ask: Callable[[DraftModel], T], nothing: T) -> T:
        """Asks the draft model; returns `nothing` if there is none any more, or if it fails now, which is the end."""
        if self._model is None:
            return nothing
        try:
            return ask(self._model)
        except Exception as error:  # noqa: BLE001 nothing that a draft model does may end the worker
            get().error("DRAFT_MODEL_OFF", error=f"{type(error).__name__}: {error}")
        try:
            self.close()
        except Exception as error:  # noqa: BLE001 the same: it is not used any more
            get().error("DRAFT_MODEL_NOT_CLOSED", error=f"{type(error).__name__}: {error}")
        return nothing

    def _look(self, model: DraftModel, runs: Sequence[Run]) -> None:
        right, judged = model.look(runs)
        self._right, self._judged = self._right + right, self._judged + judged
        if right:
            self._metrics.draft_model_accepted_tokens.inc(right)
        if not runs:
            self.interrupt()

    def _count(self, model: DraftModel, runs: Sequence[Run], cost: StepCost) -> int:
        if self._fixed is not None:
            return self._fixed
        now, decoding = self._clock(), [run for run in runs if not run.ended]
        if not decoding or not all(run.is_decoding for run in decoding):  # a prompt is under way, or waits
            self.interrupt()
            return 0
        level = size_of(len(decoding))
        self._close_interval(now, level)
        if level != self._level and self._level in self._courses:
            self._courses[self._level] = left(self._courses[self._level])
        self._level = level
        course = self._courses[level] = self._begun(model, self._courses.get(level, Course()), decoding, cost)
        self._quiet_steps = BASE_STEPS - course.now.steps if course.phase == "without" else 0
        self._quiet_runs = runs
        self._began, self._seen = self._clock(), [(run, len(run.tokens)) for run in decoding]
        self._steps, self._guessed, self._right, self._judged, self._catch_up_s = 1, 0, 0, 0, 0.0
        return course.guesses if model.call_s(len(decoding)) <= LONGEST_CALL_S else 0

    def _begun(self, model: DraftModel, course: Course, decoding: Sequence[Run], cost: StepCost) -> Course:
        """Returns the course with a probe begun, if it is time for one (`trials.begun`)."""
        if course.base_s is None or (course.phase == "without" and course.now.steps):
            return course  # a part of the time without guesses is not over
        step_s, call_s = course.base_s * len(decoding), model.call_s(len(decoding))
        self._prices = prices(cost, len(decoding), call_s, step_s)
        if course.phase != "without":
            return course
        if not has_hope(self._prices):
            return remeasured(course, model.measure()) if is_due(course, call_s) else course
        catch_up_s = model.catch_up_s(sum(model.lacks(run) for run in decoding if run.draft_room))
        return begun(course, self._prices, step_s=step_s, catch_up_s=catch_up_s)

    def _guess(self, model: DraftModel, asked: Sequence[tuple[Run, int]]) -> list[list[int]]:
        behind = [run for run, _ in asked if model.lacks(run) and self._is_worth_it(model, run)]
        if behind:
            began = self._clock()
            model.catch_up(behind)
            self._catch_up_s += self._clock() - began
        guesses = model.guess(asked)
        count = sum(map(len, guesses))
        self._guessed += count
        self._metrics.draft_model_tokens.inc(count)
        return guesses

    def _is_worth_it(self, model: DraftModel, run: Run) -> bool:
        """Whether the run has so much before it that computing its prompt can pay."""
        course = self._courses.get(self._level)
        if self._fixed is not None or course is None or course.base_s is None:
            return True
        # A step without guesses takes base_s for each of the runs, and all of them wait for the prompt of one.
        rest_s = run.draft_room * course.base_s
        return model.catch_up_s(model.lacks(run)) <= WORTH_SHARE * rest_s

    def _close_interval(self, now: float, level: int) -> None:
        """Tells the course of the level what the steps since the last call gave, if the level is still the same."""
        if self._began is None or level != self._level:
            return
        interval = Interval(
            tokens=sum(len(run.tokens) - before for run, before in self._seen),
            seconds=now - self._began,
            steps=self._steps,
            guessed=self._guessed,
            catch_up_s=self._catch_up_s,
            right=self._right,
            judged=self._judged,
        )
        before = self._courses[level]
        course = self._courses[level] = observed(before, interval, self._prices)
        if course.phase == before.phase:
            return
        told = {"requests": level, "guesses": before.guesses, "right": round(course.share, 3)}
        if before.phase == "trial" and course.phase == "with":
            get().info("DRAFT_MODEL_PAYS", **told)
        elif before.phase == "check" and course.phase != "with":
            get().info("DRAFT_MODEL_RESTS", **told)
        elif course.phase == "without":
            get().debug("DRAFT_MODEL_TRIED", **told)


def prices(cost: StepCost, decoding: int, call_s: float, step_s: float) -> Prices:
    """Returns what guesses cost, as shares of a step of `decoding` runs without guesses, which takes `step_s` seconds.

    `call_s` are the seconds of a call of the draft model for these runs. `cost` is that of this stage's steps; those of
    other stages are taken to grow alike. A size of step that was never measured counts as if it took no longer than the
    next smaller one, until a probe measures it.
    """

    def stage_s(tokens: int) -> float | None:
        measured = cost.measured_size(tokens)
        return None if measured is None else cost.by_tokens[measured]

    alone = stage_s(decoding)
    if not alone:
        return Prices(call=call_s / step_s)
    steps = {
        guesses: max(1.0, (stage_s(decoding * (1 + guesses)) or alone) / alone) for guesses in range(1, MAX_DRAFTS + 1)
    }
    return Prices(call=call_s / step_s, steps=steps)

"""Guesses for the first stage's batches: asks the draft model where that pays, and never lets it do harm."""

import time
from collections.abc import Callable, Sequence

from blockrelay.observability.logs import get
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.constants import MAX_DRAFTS
from blockrelay_worker.runs.run import Run
from blockrelay_worker.scheduling.step_cost import SIZES, StepCost
from blockrelay_worker.speculation.draft_model import LONGEST_CALL_S, DraftModel
from blockrelay_worker.speculation.gain import Prices
from blockrelay_worker.speculation.trials import Course, Interval, begun, left, observed

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
        self._cost, self._prices = StepCost(), Prices(call=1.0)
        self._decoding = 1
        # The interval that goes on since the last step: its begin (None: there is none), its runs and their tokens.
        self._began: float | None = None
        self._seen: list[tuple[Run, int]] = []
        self._guessed = self._right = self._judged = 0
        self._catch_up_s = 0.0

    @property
    def courses(self) -> dict[int, Course]:
        """The course of each level of load."""
        return self._courses

    def look(self, runs: Sequence[Run]) -> None:
        """Judges guesses, and frees pages of runs that have gone."""
        if self._model is None:
            return
        right, judged = self._model.look(runs)
        self._right, self._judged = self._right + right, self._judged + judged
        if right:
            self._metrics.draft_model_accepted_tokens.inc(right)
        if not runs:
            self.interrupt()

    def count(self, runs: Sequence[Run], cost: StepCost) -> int:
        """Returns how many tokens to guess for each run of the next batch (`Guesser.count`)."""
        if self._model is None:
            return 0
        if self._fixed is not None:
            return self._fixed
        now, decoding = self._clock(), [run for run in runs if not run.ended]
        if not decoding or not all(run.is_decoding for run in decoding):  # a prompt is under way, or waits
            self.interrupt()
            return 0
        level = max((size for size in SIZES if size <= len(decoding)), default=SIZES[-1])
        self._close_interval(now, level)
        if level != self._level and self._level in self._courses:
            self._courses[self._level] = left(self._courses[self._level])
        self._level, self._cost, self._decoding = level, cost, len(decoding)
        course = self._courses.get(level, Course())
        if course.base_s is not None:
            step_s = course.base_s * len(decoding)
            self._prices = prices(cost, len(decoding), self._model.call_s(len(decoding)), step_s)
            if course.phase == "without":
                catch_up_s = self._model.catch_up_s(sum(self._model.lacks(run) for run in decoding if run.draft_room))
                course = begun(course, self._prices, step_s=step_s, catch_up_s=catch_up_s)
        self._courses[level] = course
        self._began, self._seen = now, [(run, len(run.tokens)) for run in decoding]
        self._guessed, self._right, self._judged, self._catch_up_s = 0, 0, 0, 0.0
        return course.guesses if self._model.call_s(len(decoding)) <= LONGEST_CALL_S else 0

    def guess(self, asked: Sequence[tuple[Run, int]]) -> list[list[int]]:
        """Returns guesses for each run; none for one whose prompt the draft model does not know yet."""
        nothing: list[list[int]] = [[] for _ in asked]
        if self._model is None:
            return nothing
        try:
            behind = [run for run, _ in asked if self._model.lacks(run) and self._is_worth_it(self._model, run)]
            if behind:
                began = self._clock()
                self._model.catch_up(behind)
                self._catch_up_s += self._clock() - began
            guesses = self._model.guess(asked)
        except Exception as error:  # noqa: BLE001 nothing that a draft model does may end the worker
            self._end(error)
            return nothing
        count = sum(map(len, guesses))
        self._guessed += count
        self._metrics.draft_model_tokens.inc(count)
        return guesses

    def interrupt(self) -> None:
        """Drops the interval that goes on: its time says nothing about guesses."""
        self._began = None

    def close(self) -> None:
        """Frees the memory of the draft model."""
        model, self._model = self._model, None
        if model is not None:
            model.clear()

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
            guessed=self._guessed,
            catch_up_s=self._catch_up_s,
            right=self._right,
            judged=self._judged,
        )
        before = self._courses[level]
        course = self._courses[level] = observed(before, interval, self._prices)
        if course.phase == "with" and before.phase == "trial":
            get().info("DRAFT_MODEL_PAYS", requests=level, guesses=course.guesses, right=round(course.share, 3))
        elif course.phase == "without" and before.phase == "check":
            get().info("DRAFT_MODEL_RESTS", requests=level, right=round(course.share, 3))

    def _end(self, error: Exception) -> None:
        get().error("DRAFT_MODEL_OFF", error=f"{type(error).__name__}: {error}")
        try:
            self.close()
        except Exception as late:  # noqa: BLE001 the same: it is not used any more
            get().error("DRAFT_MODEL_NOT_CLOSED", error=f"{type(late).__name__}: {late}")


def prices(cost: StepCost, decoding: int, call_s: float, step_s: float) -> Prices:
    """Returns what guesses cost, as shares of a step of `decoding` runs without guesses, which takes `step_s` seconds.

    `call_s` are the seconds of a call of the draft model for these runs. `cost` is that of this stage's steps; those of
    other stages are taken to grow alike. A size of step that was never measured counts as if it took no longer than the
    next smaller one, until a probe measures it.
    """

    def stage_s(tokens: int) -> float | None:
        measured = max((size for size in cost.by_tokens if size <= tokens), default=None)
        return None if measured is None else cost.by_tokens[measured]

    alone = stage_s(decoding)
    if not alone:
        return Prices(call=call_s / step_s)
    steps = {
        guesses: max(1.0, (stage_s(decoding * (1 + guesses)) or alone) / alone) for guesses in range(1, MAX_DRAFTS + 1)
    }
    return Prices(call=call_s / step_s, steps=steps)

"""A stage that serves is asked now and then what it was asked at its load: it must still compute that.

Each time the next of the known steps, so that every way through the kernels comes again, on pages that no run has. What
stays in them between two canaries is looked at too: a step behind others reads what those have left there.
"""

from collections.abc import Sequence
from typing import Protocol

from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.onnx.known_answers import Step


class Known(Protocol):
    """What is known of a stage: `Answers`, or another form of it."""

    @property
    def steps(self) -> Sequence[Step]: ...

    def check_step(self, stage: Executor, number: int, *, first_page: int, tolerance: float, where: str) -> None:
        """See `Answers.check_step`."""
        ...


class Canary:
    """Of one stage. Used by the thread that runs it."""

    def __init__(self, stage: Executor, answers: Known, *, first_page: int, tolerance: float) -> None:
        """`known_answers.PAGES_NEEDED` pages from `first_page` on are its own; `tolerance` as of `check`."""
        self._stage, self._answers, self._tolerance = stage, answers, tolerance
        self._first_page, self._next = first_page, 0

    def sing(self) -> None:
        """One step of at most 65 rows. Raises KnownAnswerMismatch when its result is not the known one, ExecutionError
        when there is none."""
        self._answers.check_step(
            self._stage,
            self._next,
            first_page=self._first_page,
            tolerance=self._tolerance,
            where="a canary: the device",
        )
        self._next = (self._next + 1) % len(self._answers.steps)

"""Canaries: a stage that serves recomputes known steps now and then, and must still give the known results.

Each canary takes the next step, so that every path through the kernels comes again. The pages belong to no run. What
stays in them between two canaries is checked too: a step with a past reads what earlier steps left there.
"""

from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.onnx.as_is.answers import Known


class Canary:
    """The canaries of one stage. Used by the thread that runs it."""

    def __init__(self, stage: Executor, answers: Known, *, first_page: int, tolerance: float) -> None:
        """`known_answers.PAGES_NEEDED` pages from `first_page` on belong to the canaries. `tolerance`: largest error of
        a row that counts as right, relative to the row's length."""
        self._stage, self._answers, self._tolerance = stage, answers, tolerance
        self._first_page, self._next = first_page, 0

    def check(self) -> None:
        """Computes the next step, of at most 65 tokens. Raises KnownAnswerMismatch if its result is not the known one,
        ExecutionError if there is no result."""
        self._answers.check_step(
            self._stage,
            self._next,
            first_page=self._first_page,
            tolerance=self._tolerance,
            where="a canary: the device",
        )
        self._next = (self._next + 1) % len(self._answers.steps)

"""The interface between the first stage's batches and a draft model, which guesses tokens where look-up finds none."""

from collections.abc import Sequence
from typing import Protocol

from blockrelay_worker.runs.run import Run
from blockrelay_worker.scheduling.step_cost import StepCost


class Guesser(Protocol):
    """Guesses the next tokens of runs. It raises nothing: an error of its own ends the guesses. One thread uses it."""

    def look(self, runs: Sequence[Run]) -> None:
        """Looks at all runs before a batch is made, and forgets what it holds for those that have gone."""
        ...

    def count(self, runs: Sequence[Run], cost: StepCost) -> int:
        """Returns how many tokens to guess for each run of the next batch, which has decode tokens alone.

        `runs` are all runs of the worker, and `cost` what steps of the served model take.
        """
        ...

    def guess(self, asked: Sequence[tuple[Run, int]]) -> list[list[int]]:
        """Returns at most as many guesses for each run as are asked for, and perhaps none; called after `count`."""
        ...

    def interrupt(self) -> None:
        """Notes that the next step also has prompt tokens, so that its time says nothing about guesses."""
        ...

    def close(self) -> None:
        """Frees its memory. Nothing may be called afterwards."""
        ...

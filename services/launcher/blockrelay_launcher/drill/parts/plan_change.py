"""Applies another plan in the middle of a drill (`blockrelay plan apply`): all workers load other blocks."""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from blockrelay.host.child_command import run_command
from blockrelay_launcher.drill.parts.part import DrillPart
from blockrelay_launcher.drill.system import DrilledSystem

#: Seconds before another try: Redis may be away or full, and workers dead, when the plan is applied.
AGAIN_S = 0.5


@dataclass(slots=True)
class PlanChange(DrillPart):
    """The part that applies the plan in `file` at the time `at` (monotonic). It is no fault: `done` stays empty."""

    system: DrilledSystem
    file: Path
    at: float
    _problem: str = field(default="it was not its time yet", init=False)
    """Why the plan is not applied; empty: it is."""

    @property
    def troubles(self) -> list[str]:
        """A sentence if the plan was not applied."""
        return [f"the plan {self.file} was not applied: {self._problem}"] if self._problem else []

    def _run(self) -> None:
        wait = max(0.0, self.at - time.monotonic())
        while self._problem and not self._over.wait(wait):
            argv = [sys.executable, "-P", "-m", "blockrelay_launcher", "plan", "apply", str(self.file), "--json"]
            done = run_command([*argv, "--data", str(self.system.data)])
            self._problem = done.last_line if done.code else ""
            wait = AGAIN_S

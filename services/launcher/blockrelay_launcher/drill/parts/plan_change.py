"""Another plan in the middle of a drill, by `blockrelay plan apply`: all workers load other blocks, and go on."""

import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from blockrelay_launcher.drill.parts.part import DrillPart
from blockrelay_launcher.drill.system import DrilledSystem

#: Seconds before it is tried again: Redis may be away or full, and workers dead, when the plan is applied.
AGAIN_S = 0.5


@dataclass(slots=True)
class PlanChange(DrillPart):
    """At `at` (monotonic) the plan in `file` is applied. It hurts nobody on purpose: `done` stays empty."""

    system: DrilledSystem
    file: Path
    at: float
    _said: str = field(default="it was not its time yet", init=False)

    @property
    def troubles(self) -> list[str]:
        """What did not happen."""
        return [f"the plan {self.file} was not applied: {self._said}"] if self._said else []

    def _run(self) -> None:
        wait = max(0.0, self.at - time.monotonic())
        while self._said and not self._over.wait(wait):
            argv = [sys.executable, "-P", "-m", "blockrelay_launcher", "plan", "apply", str(self.file), "--json"]
            done = subprocess.run([*argv, "--data", str(self.system.data)], capture_output=True, text=True, check=False)
            self._said = done.stderr.strip()[-300:] if done.returncode else ""
            wait = AGAIN_S

"""Another plan in the middle of a drill, by `blockrelay plan apply`: all workers load other blocks, and go on."""

import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from blockrelay_launcher.drill.faults import Fault
from blockrelay_launcher.drill.system import DrilledSystem

#: Seconds before it is tried again: Redis may be away or full, and workers dead, when the plan is applied.
AGAIN_S = 0.5


@dataclass(slots=True)
class PlanChange:
    """At `at` (monotonic) the plan in `file` is applied. It hurts nobody on purpose: `done` stays empty."""

    system: DrilledSystem
    file: Path
    at: float
    done: list[Fault] = field(default_factory=list[Fault], init=False)
    _said: str = field(default="it was not its time yet", init=False)
    _over: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="plan change", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """A plan that is not applied by now is not."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

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

"""The part of a drill that takes memory from the workers' machine and gives it back, so that the precision changes."""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from blockrelay_launcher.drill.faults import Fault
from blockrelay_launcher.drill.parts.part import DrillPart
from blockrelay_launcher.drill.system import DrilledSystem, add_setting

#: Mean seconds for which memory lacks, and for which it is there again: a worker starts, says so, and all change.
LACKS_S, IS_THERE_S = 12.0, 15.0
#: Seconds before the system goes back to the larger precision; operators have minutes.
RESTORE_AFTER_S = 3.0


def prepare_shortages(data: Path, workers: Sequence[str], schedulers: Sequence[str]) -> None:
    """Has workers of an `up` on the folder `data` look into a file for free memory. Call it before `up` starts.

    `workers` and `schedulers` are the names that it gives them.
    """
    for name in workers:
        add_setting(data, name, f"BLOCKRELAY_INJECT_MEMORY={_file(data)}")
    for name in schedulers:
        add_setting(data, name, f"BLOCKRELAY_RESTORE_AFTER_S={RESTORE_AFTER_S}")


@dataclass(slots=True)
class MemoryShortages(DrillPart):
    """The part that says at times that no memory is free, and kills a worker then: it starts without memory."""

    system: DrilledSystem
    rng: Random

    def finish(self) -> None:
        """Ends the thread, and gives memory back."""
        DrillPart.finish(self)
        _file(self.system.data).unlink(missing_ok=True)

    def _run(self) -> None:
        file = _file(self.system.data)
        while not self._over.wait(IS_THERE_S * self.rng.uniform(0.5, 1.5)):
            file.write_text("0")
            if workers := self.system.pids("worker"):
                pid = self.rng.choice(workers)
                requests = self.system.requests_on(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    now = time.monotonic()
                    self.done.append(Fault(at=now, kind="kill", target="worker", requests=requests))
                    self.done.append(Fault(at=now, kind="degrade", target="scheduler"))
            self._over.wait(LACKS_S * self.rng.uniform(0.5, 1.5))
            file.unlink(missing_ok=True)


def _file(data: Path) -> Path:
    """Returns the path of the file with the number of free bytes, in the folder of `up`."""
    return data / "free-memory"

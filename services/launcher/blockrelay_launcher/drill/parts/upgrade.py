"""A rolling upgrade in the middle of a drill: workers of another numerics id replace the old ones, one by one."""

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from blockrelay_launcher.drill.faults import Fault
from blockrelay_launcher.drill.parts.part import DrillPart
from blockrelay_launcher.drill.system import DrilledSystem

#: New workers compute other bits (the setting `inject_numerics`), under a numerics id that ends in this.
SALT = "next"
LOOK_S = 0.1


@dataclass(slots=True)
class Upgrade(DrillPart):
    """From `begin` to `end` (monotonic), evenly: the next of `workers` gets new settings and is told to drain.

    Its turn is over once a process with the new settings runs in its place, whatever killed it on the way. The last one
    is killed in its drain, so that requests are left which nobody of their numerics id can finish. `done` has each
    signal.
    """

    system: DrilledSystem
    workers: Sequence[str]
    begin: float
    end: float
    _upgraded: list[str] = field(default_factory=list[str], init=False)

    @property
    def troubles(self) -> list[str]:
        """What did not happen: a sentence for each worker that was not replaced."""
        return [f"{worker} was not upgraded" for worker in self.workers if worker not in self._upgraded]

    def _run(self) -> None:
        pause = (self.end - self.begin) / len(self.workers)
        for number, worker in enumerate(self.workers):
            if self._over.wait(max(0.0, self.begin + number * pause - time.monotonic())):
                return
            self.system.set_for_next_start(worker, f"BLOCKRELAY_INJECT_NUMERICS={SALT}")
            told: Counter[int] = Counter()
            while not self._is_new(worker, told):
                if self._over.wait(LOOK_S):
                    return
            self._upgraded.append(worker)

    def _is_new(self, worker: str, told: Counter[int]) -> bool:
        """Whether `worker` runs with the new settings; a process with the old ones is told to drain, once. `told`
        counts the signals that processes were sent."""
        found = self.system.process_of(worker)
        if found is None:
            return False
        pid, settings = found
        if settings.get("BLOCKRELAY_INJECT_NUMERICS") == SALT:
            return True
        if told[pid] == 0:
            self._send(signal.SIGTERM, "drain", pid)
        elif told[pid] == 1 and worker == self.workers[-1]:
            self._send(signal.SIGKILL, "kill", pid)
        told[pid] += 1
        return False

    def _send(self, number: int, kind: Literal["drain", "kill"], pid: int) -> None:
        requests = self.system.requests_on(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            self.done.append(Fault(at=time.monotonic(), kind=kind, target="worker", requests=requests))

"""Runs a rolling upgrade in the middle of a drill: workers of another numerics id replace the old ones in turn."""

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

#: Suffix of the numerics id of the new workers, which compute other bits (the setting `inject_numerics`).
SALT = "next"
#: Seconds between two checks of the worker that is upgraded.
LOOK_S = 0.1


@dataclass(slots=True)
class Upgrade(DrillPart):
    """The part that upgrades `workers` one by one, evenly from `begin` to `end` (monotonic).

    `workers` has at least one service name that `up` gave, such as worker-1; a worker id would be new at each start.
    Each gets new settings and is told to drain. Its turn is over when a process with the new settings runs in its
    place. The last one is killed while it drains, so that requests remain which no worker of their numerics id can
    finish. `done` has each signal.
    """

    system: DrilledSystem
    workers: Sequence[str]
    begin: float
    end: float
    _upgraded: list[str] = field(default_factory=list[str], init=False)

    @property
    def troubles(self) -> list[str]:
        """A sentence for each worker that was not replaced."""
        return [f"{worker_id} was not upgraded" for worker_id in self.workers if worker_id not in self._upgraded]

    def _run(self) -> None:
        pause = (self.end - self.begin) / len(self.workers)
        for number, worker_id in enumerate(self.workers):
            if self._over.wait(max(0.0, self.begin + number * pause - time.monotonic())):
                return
            self.system.set_for_next_start(worker_id, f"BLOCKRELAY_INJECT_NUMERICS={SALT}")
            signals: Counter[int] = Counter()
            while not self._is_new(worker_id, signals):
                if self._over.wait(LOOK_S):
                    return
            self._upgraded.append(worker_id)

    def _is_new(self, worker_id: str, signals: Counter[int]) -> bool:
        """Returns True if the service `worker_id` runs with the new settings; else tells its process to drain, once.

        `signals` counts the calls for each process.
        """
        process = self.system.process_of(worker_id)
        if process is None:
            return False
        pid, settings = process
        if settings.get("BLOCKRELAY_INJECT_NUMERICS") == SALT:
            return True
        if signals[pid] == 0:
            self._send(signal.SIGTERM, "drain", pid)
        elif signals[pid] == 1 and worker_id == self.workers[-1]:
            self._send(signal.SIGKILL, "kill", pid)
        signals[pid] += 1
        return False

    def _send(self, number: int, kind: Literal["drain", "kill"], pid: int) -> None:
        requests = self.system.requests_on(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            self.done.append(Fault(at=time.monotonic(), kind=kind, target="worker", requests=requests))

"""The part of a drill in which workers share their stages with ranks, and ranks are killed."""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from random import Random

from blockrelay_launcher.drill.faults import Fault
from blockrelay_launcher.drill.parts.part import DrillPart
from blockrelay_launcher.drill.system import DrilledSystem

#: Ranks of each worker: rank 0 is the worker itself.
RANKS = 2
#: Mean seconds between two deaths: a stage is loaded again within about two.
EVERY_S = 3.0


@dataclass(slots=True)
class RankDeaths(DrillPart):
    """The part that kills a rank of one of the workers, one after the other."""

    system: DrilledSystem
    rng: Random

    def _run(self) -> None:
        while not self._over.wait(EVERY_S * self.rng.uniform(0.5, 1.5)):
            ranks = self.system.pids("device")  # the children of workers
            if ranks:
                pid = self.rng.choice(ranks)
                worker = self.system.worker_of(pid)
                requests = None if worker is None else self.system.requests_on(worker)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.done.append(Fault(at=time.monotonic(), kind="rank", target="worker", requests=requests))

"""What is done to the servers, again and again: each time they are whole, another master."""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from blockrelay_launcher.drill.faults import Fault
from blockrelay_launcher.drill.parts.part import DrillPart
from blockrelay_launcher.drill.system import DrilledSystem
from tests.support.redis.failover import Arrangement, Cluster
from tests.support.redis.server_process import Process

#: For so long the master answers and no replica hears of it, before it dies. Seconds.
CUT_S = (0.2, 1.0)
#: From one failover, once all is whole again, to the next. Seconds.
QUIET_S = (1.0, 4.0)
#: Failovers of one cell before it is another's turn: in a cluster two planned, two killed, one of them with a gateway.
TURN = 4


@dataclass(slots=True)
class Failovers(DrillPart):
    """Masters are cut off from their replicas and killed; with every second one a gateway dies. In a cluster every
    second failover is planned instead, and each of `cells` has its turn. `took`: seconds until there was another
    master; `in_vain`: those who decide did not make one (where a machine stands still, Sentinels do nothing for half a
    minute, and then find replicas too old), and the old one went on."""

    systems: Sequence[DrilledSystem]
    servers: Arrangement
    cells: Sequence[str]
    rng: Random
    killed: int = field(default=0, init=False)
    planned: int = field(default=0, init=False)
    in_vain: int = field(default=0, init=False)
    took: list[float] = field(default_factory=list[float], init=False)
    _failed: list[str] = field(default_factory=list[str], init=False)

    @property
    def troubles(self) -> list[str]:
        """As of a part."""
        return self._failed if self.took else [*self._failed, "no failover was done"]

    def _run(self) -> None:
        try:
            while not self._over.wait(self.rng.uniform(*QUIET_S)):
                done = self.killed + self.planned
                self.servers.cell = self.cells[done // TURN % len(self.cells)]
                if isinstance(self.servers, Cluster) and self.planned < self.killed:
                    self._plan()
                else:
                    self._kill()
                self.servers.mend()
        except Exception as error:
            self._failed.append(f"failovers: {type(error).__name__}: {error}")
            raise

    def _plan(self) -> None:
        began = time.monotonic()
        self.servers.fail_over()
        self.took.append(time.monotonic() - began)
        self.planned += 1

    def _kill(self) -> None:
        old = self.servers.agreed_master()
        _cut_off(old)
        self._over.wait(self.rng.uniform(*CUT_S))
        if self.killed % 2:
            self._kill_a_gateway()
        began = time.monotonic()
        self.done.append(Fault(at=began, kind="kill", target="redis-control"))
        self.killed += 1
        try:
            self.servers.kill(old)
            self.took.append(time.monotonic() - began)
        except AssertionError:
            self.in_vain += 1

    def _kill_a_gateway(self) -> None:
        for pid in sorted(pid for system in self.systems for pid in system.pids("gateway"))[:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.done.append(Fault(at=time.monotonic(), kind="kill", target="gateway"))


def _cut_off(master: Process) -> None:
    """Its replicas hear nothing of it any more, until it has been started again."""
    replicas_come_as = "default" if master.security is None else "replica"
    master.ask("ACL", "SETUSER", replicas_come_as, "-psync", "-sync")
    master.ask("CLIENT", "KILL", "TYPE", "replica")

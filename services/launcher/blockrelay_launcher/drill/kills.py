"""Kills at random: one after the other, of a random process of a random role."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from blockrelay_launcher.drill.system import DrilledSystem, Role

#: How long a stopped process sleeps, in seconds: shorter and longer than it takes to be declared dead.
SLEEPS_S = (0.5, 2.0, 5.0, 8.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One process hurt at `at` (monotonic). `stopped_s` 0: killed. `requests`: those on it, None where nobody knows."""

    at: float
    role: Role
    pid: int
    stopped_s: float = 0.0
    requests: frozenset[str] | None = None


@dataclass(slots=True)
class Killer:
    """Kills about every `every_s` seconds from `start` to `finish`. With `stops`, a third only sleep for a while."""

    system: DrilledSystem
    roles: Sequence[Role]
    every_s: float
    rng: Random
    stops: bool = False
    kills: list[Kill] = field(default_factory=list[Kill], init=False)
    _over: threading.Event = field(default_factory=threading.Event, init=False)
    _asleep: dict[int, float] = field(default_factory=dict[int, float], init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="killer", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """No more kills; who sleeps wakes up."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._wake(float("inf"))

    def _run(self) -> None:
        due = time.monotonic() + self.every_s
        while not self._over.wait(max(0.0, min(0.1, due - time.monotonic()))):
            self._wake(time.monotonic())
            if time.monotonic() >= due:
                due += self.every_s * self.rng.uniform(0.5, 1.5)
                self._strike(self.rng.choice(list[Role](self.roles)))

    def _strike(self, role: Role) -> None:
        awake = [pid for pid in self.system.pids(role) if pid not in self._asleep]
        if not awake:
            return  # all of them are dead or asleep at this moment
        pid = self.rng.choice(awake)
        stopped_s = self.rng.choice(SLEEPS_S) if self.stops and self.rng.random() < 1 / 3 else 0.0
        requests = self.system.requests_on(pid) if role == "worker" else None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if stopped_s else signal.SIGKILL)
            at = time.monotonic()
            self.kills.append(Kill(at=at, role=role, pid=pid, stopped_s=stopped_s, requests=requests))
            if stopped_s:
                self._asleep[pid] = at + stopped_s

    def _wake(self, now: float) -> None:
        for pid in [pid for pid, until in self._asleep.items() if until <= now]:
            del self._asleep[pid]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

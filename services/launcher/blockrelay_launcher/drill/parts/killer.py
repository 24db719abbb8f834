"""Executes the faults of a drill, one after the other as they were drawn, and ends each after its time."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from blockrelay.errors import RedisTrouble
from blockrelay.redis.errors import CommandError
from blockrelay_launcher.drill.faults import SERVERS, Fault, Strike, Target
from blockrelay_launcher.drill.parts.part import DrillPart
from blockrelay_launcher.drill.system import DrilledSystem

#: Seconds for giving a full Redis its room back at the end: a killed one may need some to answer.
RESTORE_S = 30.0


@dataclass(slots=True)
class Killer(DrillPart):
    """The part that executes the faults in `plan` from `start` to `finish`; `done` has the executed ones, in order.

    `plan` must be endless. A fault is left out if it has no target (all processes of the role are dead or stopped, the
    Redis is already full) or if the Redis does not answer.
    """

    system: DrilledSystem
    plan: Iterator[Strike]
    _asleep: dict[int, float] = field(default_factory=dict[int, float], init=False)
    """Time (monotonic) at which each stopped process continues, by pid."""
    #: For each full Redis the time (monotonic) at which that ends, and the limit that it gets back.
    _full: dict[Target, tuple[float, int]] = field(default_factory=dict[Target, tuple[float, int]], init=False)

    def finish(self) -> None:
        """Ends the thread and its faults: stopped processes continue, and full servers get their room back.

        Takes up to RESTORE_S if a server does not answer.
        """
        DrillPart.finish(self)
        end = time.monotonic() + RESTORE_S
        self._undo(float("inf"))
        while self._full and time.monotonic() < end and self.system.process.poll() is None:
            time.sleep(0.1)
            self._undo(float("inf"))

    def _run(self) -> None:
        strike = next(self.plan)
        due = time.monotonic() + strike.after_s
        while not self._over.wait(max(0.0, min(0.1, due - time.monotonic()))):
            self._undo(time.monotonic())
            if time.monotonic() >= due:
                with contextlib.suppress(RedisTrouble, CommandError):  # the Redis may be dead or stopped now
                    self._strike(strike)
                strike = next(self.plan)
                due += strike.after_s

    def _strike(self, strike: Strike) -> None:
        if strike.kind == "full":
            self._fill(strike)
        elif strike.kind == "cut":
            self._cut(strike)
        else:
            self._signal(strike)

    def _signal(self, strike: Strike) -> None:
        awake = [pid for pid in self.system.pids(strike.target) if pid not in self._asleep]
        if not awake:
            return
        pid = awake[int(strike.pick * len(awake))]
        worker = pid if strike.target == "worker" else None
        if strike.target == "device":
            worker = self.system.worker_of(pid)
        requests = None if worker is None else self.system.requests_on(worker)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if strike.kind == "stop" else signal.SIGKILL)
            at = self._note(strike, requests)
            if strike.kind == "stop":
                self._asleep[pid] = at + strike.lasts_s

    def _fill(self, strike: Strike) -> None:
        if strike.target in self._full:
            return
        with self.system.administrator(strike.target) as client:
            limit = int(client.config_get("maxmemory")["maxmemory"])  # pyright: ignore
            self._full[strike.target] = (time.monotonic() + strike.lasts_s, limit)
            client.config_set("maxmemory", 1)
        self._note(strike, None)

    def _cut(self, strike: Strike) -> None:
        with self.system.administrator(strike.target) as client:
            if strike.everybody:
                client.client_kill_filter(_type="normal", skipme=True)  # pyright: ignore
            else:
                mine = client.client_id()
                clients: list[dict[str, Any]] = client.client_list(_type="normal")  # pyright: ignore
                others = sorted(int(one["id"]) for one in clients if int(one["id"]) != mine)
                if not others:
                    return
                with contextlib.suppress(CommandError):  # the connection may have ended by itself
                    client.client_kill_filter(_id=str(others[int(strike.pick * len(others))]))  # pyright: ignore
        self._note(strike, None)

    def _note(self, strike: Strike, requests: frozenset[str] | None) -> float:
        at = time.monotonic()
        self.done.append(Fault(at=at, kind=strike.kind, target=strike.target, requests=requests))
        return at

    def _undo(self, now: float) -> None:
        """Ends the faults whose time is over at `now`; the next call retries the ones that cannot end yet."""
        for pid in [pid for pid, until in self._asleep.items() if until <= now]:
            del self._asleep[pid]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for target in SERVERS:
            until, limit = self._full.get(target, (float("inf"), 0))
            if target not in self._full or until > now or any(pid in self._asleep for pid in self.system.pids(target)):
                continue  # nothing to end, or a stopped server that would not answer
            with contextlib.suppress(RedisTrouble, CommandError), self.system.administrator(target) as client:
                client.config_set("maxmemory", limit)
                del self._full[target]

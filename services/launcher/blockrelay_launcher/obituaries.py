"""Tells the cell at once that a worker process has ended, so that its requests run again within milliseconds."""

import contextlib
import socket
import time
from typing import Any, Literal, cast

from blockrelay import scripts as calls
from blockrelay.errors import ServiceUnavailable
from blockrelay.keys import Keys
from blockrelay.redis_link import UNREACHABLE, Scripts, backoff_s, connect
from blockrelay.settings import Settings

#: Of reaching Redis at the start, a few seconds in all.
ATTEMPTS = 10


class Obituaries:
    """DEAD for the workers of ended processes. What cannot be sent now is sent by the next `send`."""

    def __init__(self, settings: Settings, control_url: str, payload_url: str | None) -> None:
        self._keys = Keys(settings.cell)
        self._control = connect(control_url)
        self._payload = connect(payload_url) if payload_url else self._control
        self._scripts = Scripts(self._control, self._keys, retention_s=settings.retention_s)
        self._pending: set[int] = set()

    def forget_everybody(self) -> None:
        """Nobody of an earlier `up` on the same data is left: their requests run again, and nobody is to blame.

        Raises ServiceUnavailable when Redis, which has just answered, does not any more.
        """
        for attempt in range(ATTEMPTS):
            with contextlib.suppress(*UNREACHABLE):
                for worker in self._registered():
                    self._bury(worker, "forgotten")
                return
            time.sleep(backoff_s(attempt))
        raise ServiceUnavailable("the control Redis answered, and then no more")

    def add(self, pid: int) -> None:
        """Process `pid` of this host has ended."""
        self._pending.add(pid)

    def send(self) -> None:
        """Report what was added. While Redis is away nothing is lost: it stays for the next call."""
        if not self._pending:
            return
        try:
            mine = tuple(f"{socket.gethostname()}:{pid}:" for pid in self._pending)
            for worker in self._registered():
                if worker.startswith(mine):
                    self._bury(worker, "death")
        except UNREACHABLE:
            return
        self._pending.clear()

    def close(self) -> None:
        self._control.close()
        self._payload.close()

    def _registered(self) -> list[str]:
        return [worker.decode() for worker in cast(Any, self._control.zrange(self._keys.workers, 0, -1))]

    def _bury(self, worker: str, reason: Literal["death", "forgotten"]) -> None:
        self._scripts.run(calls.dead(worker, silent_s=0, reason=reason))
        self._payload.delete(self._keys.inbox(worker))

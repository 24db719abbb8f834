"""What a worker holds of the outside world: two Redis servers and the scripts of its cell."""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import redis
from prometheus_client import Counter

from blockrelay.errors import RedisTrouble
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.transitions.calls import Call
from blockrelay.redis.client import Scripts, backoff_s, connect
from blockrelay.redis.errors import RedisWatch
from blockrelay.settings import WorkerSettings

T = TypeVar("T")


class Stopping(Exception):
    """The process was asked to end while it waited for Redis."""


@dataclass(slots=True)
class Drain:
    """How a worker leaves: once `asked`, it takes nothing new and finishes what is here; `possible` while it serves."""

    asked: bool = False
    possible: bool = False


class StepClock:
    """How long the engine computes already; its waiting for a Redis does not count. One thread steps, any may read."""

    def __init__(self) -> None:
        self._thread = 0
        self._started: float | None = None
        self._waiting_since: float | None = None
        self.allowed_s = 0.0
        """What the step may take."""
        self.parts = 0
        """Parts of steps that were done (`went_on`)."""

    def begin(self) -> float:
        """A step of this thread begins; now, in seconds of the monotonic clock."""
        self._thread, self._started = threading.get_ident(), time.monotonic()
        return self._started

    def allow(self, seconds: float) -> None:
        """The step that has begun may take so long."""
        self.allowed_s = seconds

    def went_on(self) -> None:
        """A part of the step is done that took long by itself: counted from here on."""
        self.parts += 1
        if self._started is not None:
            self._started = time.monotonic()

    def end(self) -> None:
        self._started, self.allowed_s = None, 0.0

    def age(self) -> float:
        """Seconds that the step has computed; 0 between steps."""
        started, waiting_since = self._started, self._waiting_since
        return 0.0 if started is None else (waiting_since or time.monotonic()) - started

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Stands still meanwhile, if it is the thread of the step that waits."""
        if self._thread != threading.get_ident() or self._started is None or self._waiting_since is not None:
            yield
            return
        since = self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._started += time.monotonic() - since
            self._waiting_since = None


@dataclass(frozen=True, slots=True)
class Links:
    """Thread-safe. `payload` is `control` when no second server is configured."""

    control: redis.Redis
    payload: redis.Redis
    keys: Keys
    scripts: Scripts
    watch: RedisWatch
    stop: threading.Event
    drain: Drain = field(default_factory=Drain)
    clock: StepClock = field(default_factory=StepClock)

    @classmethod
    def open(
        cls, settings: WorkerSettings, errors: Counter, stop: threading.Event, drain: Drain | None = None
    ) -> "Links":
        """Connects lazily: nothing is sent yet."""
        control = connect(settings.control_redis, cell=settings.cell)
        payload = connect(settings.payload_redis, cell=settings.cell) if settings.payload_redis else control
        keys = Keys(settings.cell)
        scripts = Scripts(control, keys)
        return cls(control, payload, keys, scripts, RedisWatch(errors), stop, drain or Drain())

    def run_until_reachable(self, call: Call[T]) -> T:
        """Run a script until Redis does it; scripts are idempotent. Raises Stopping when the process should end."""
        return self.retry_until_reachable(lambda: self.scripts.run(call), call.script)

    def retry_until_reachable(self, action: Callable[[], Any], work: str) -> Any:
        """`action` (idempotent) until Redis does it; `work` is its name in the log.

        Raises Stopping when the process should end.
        """
        with self.clock.waiting():
            attempt = 0
            while True:
                try:
                    answer = action()
                except RedisTrouble as error:
                    self.watch.failed(work, error)
                    if self.stop.wait(backoff_s(attempt)):
                        raise Stopping from None
                    attempt += 1
                else:
                    self.watch.worked(work)
                    return answer

    def close(self) -> None:
        self.control.close()
        if self.payload is not self.control:
            self.payload.close()

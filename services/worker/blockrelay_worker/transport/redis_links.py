"""A worker's connections: the control Redis, the payload Redis, and the Lua scripts of its cell."""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
    """Raised by a wait for Redis when the process was asked to end meanwhile."""


@dataclass(slots=True)
class WorkerDrain:
    """The request to drain a worker, from the thread that received the signal to the engine."""

    is_requested: bool = False
    """The worker should take no new requests, finish those it has, and end."""
    has_served: bool = False
    """The worker has served a stage, now or before."""
    _serving: int = 0  # engines of the worker that run: two while it moves to another stage
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_possible(self) -> bool:
        """The worker serves a stage, so that it can drain."""
        return self._serving > 0

    @contextmanager
    def serving(self) -> Generator[None]:
        """Counts the worker as serving a stage while the `with` block runs."""
        with self._lock:
            self._serving, self.has_served = self._serving + 1, True
        try:
            yield
        finally:
            with self._lock:
                self._serving -= 1


class StepClock:
    """The duration of the engine's current step, without waits for Redis. One thread steps, any thread may read."""

    def __init__(self) -> None:
        self._thread = 0
        self._started: float | None = None
        self._waiting_since: float | None = None
        self.allowed_s = 0.0
        """Seconds that the current step may take; the engine sets it, and `end` sets it back to 0."""
        self.parts = 0
        """Number of calls of `progressed`."""

    def begin(self) -> float:
        """Begins a step of the calling thread; returns the monotonic time in seconds."""
        self._thread, self._started = threading.get_ident(), time.monotonic()
        return self._started

    def progressed(self) -> None:
        """Sets the age of the step back to 0 and adds 1 to `parts`: a part that may be long by itself is done."""
        self.parts += 1
        if self._started is not None:
            self._started = time.monotonic()

    def end(self) -> None:
        """Ends the step. Does nothing between steps."""
        self._started, self.allowed_s = None, 0.0

    def age(self) -> float:
        """Seconds that the current step has computed; 0 between steps."""
        started, waiting_since = self._started, self._waiting_since
        return 0.0 if started is None else (waiting_since or time.monotonic()) - started

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Stops the clock while the block runs, if the calling thread is the one that steps."""
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
    """The Redis clients of a worker, with the cell's keys and scripts. Thread-safe.

    `payload` is `control` if no second server is configured. `watch` logs and counts failures of Redis. `stop` is set
    when the process should end.
    """

    control: redis.Redis
    payload: redis.Redis
    keys: Keys
    scripts: Scripts
    watch: RedisWatch
    stop: threading.Event
    drain: WorkerDrain = field(default_factory=WorkerDrain)
    clock: StepClock = field(default_factory=StepClock)

    @classmethod
    def open(
        cls, settings: WorkerSettings, errors: Counter, stop: threading.Event, drain: WorkerDrain | None = None
    ) -> "Links":
        """Creates the clients. They connect lazily: nothing is sent yet. `errors` counts failures of Redis.

        Raises UsageError for a URL in `settings` that cannot be used.
        """
        control = connect(settings.control_redis, cell=settings.cell)
        payload = connect(settings.payload_redis, cell=settings.cell) if settings.payload_redis else control
        keys = Keys(settings.cell)
        scripts = Scripts(control, keys)
        return cls(control, payload, keys, scripts, RedisWatch(errors), stop, drain or WorkerDrain())

    def of_another_engine(self) -> "Links":
        """Returns the same links with a step clock of their own, for a second engine of this worker."""
        return replace(self, clock=StepClock())

    def run_until_reachable(self, call: Call[T]) -> T:
        """Runs a script (idempotent) until Redis answers, and returns its result.

        It waits and raises as `retry_until_reachable` does: Stopping if the process should end before Redis answers.
        """
        return self.retry_until_reachable(lambda: self.scripts.run(call), call.script)

    def retry_until_reachable(self, action: Callable[[], Any], work: str) -> Any:
        """Calls `action` (idempotent) until Redis answers, and returns its result; `work` is its name in the log.

        The time does not count as the step's. Only RedisTrouble is retried; other exceptions are raised. Raises
        Stopping when the process should end before Redis answers.
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

    def read_worker(self, worker_id: str, names: tuple[str, ...]) -> list[bytes | None]:
        """Returns fields of a worker's record by name; None for each that is missing.

        Waits for Redis; raises Stopping when the process should end meanwhile.
        """
        record = self.keys.worker(worker_id)
        return self.retry_until_reachable(lambda: self.control.hmget(record, list(names)), "read worker")

    def close(self) -> None:
        """Closes both clients."""
        self.control.close()
        if self.payload is not self.control:
            self.payload.close()

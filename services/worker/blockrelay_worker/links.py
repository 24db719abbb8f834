"""What a worker holds of the outside world: two Redis servers and the scripts of its cell."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import redis
from prometheus_client import Counter

from blockrelay.keys import Keys
from blockrelay.redis_link import UNREACHABLE, Scripts, backoff_s, connect
from blockrelay.scripts import Call
from blockrelay.settings import WorkerSettings

T = TypeVar("T")


class Stopping(Exception):
    """The process was asked to end while it waited for Redis."""


@dataclass(slots=True)
class Drain:
    """How a worker leaves: once `asked`, it takes nothing new and finishes what is here; `possible` while it serves."""

    asked: bool = False
    possible: bool = False


@dataclass(frozen=True, slots=True)
class Links:
    """Thread-safe. `payload` is `control` when no second server is configured."""

    control: redis.Redis
    payload: redis.Redis
    keys: Keys
    scripts: Scripts
    errors: Counter
    stop: threading.Event
    drain: Drain = field(default_factory=Drain)

    @classmethod
    def open(
        cls, settings: WorkerSettings, errors: Counter, stop: threading.Event, drain: Drain | None = None
    ) -> "Links":
        """Connects lazily: nothing is sent yet."""
        control = connect(settings.redis_url)
        payload = connect(settings.payload_redis_url) if settings.payload_redis_url else control
        keys = Keys(settings.cell)
        scripts = Scripts(control, keys, retention_s=settings.retention_s)
        return cls(control, payload, keys, scripts, errors, stop, drain or Drain())

    def insist(self, call: Call[T]) -> T:
        """Run a script until Redis answers; scripts are idempotent. Raises Stopping when the process should end."""
        return self.again(lambda: self.scripts.run(call))

    def again(self, action: Callable[[], Any]) -> Any:
        """`action` (idempotent) until Redis answers. Raises Stopping when the process should end."""
        attempt = 0
        while True:
            try:
                return action()
            except UNREACHABLE:
                self.errors.inc()
                if self.stop.wait(backoff_s(attempt)):
                    raise Stopping from None
                attempt += 1

    def close(self) -> None:
        self.control.close()
        if self.payload is not self.control:
            self.payload.close()

"""The events that Redis and the worker's other threads send to the engine."""

import threading
from dataclasses import dataclass

from blockrelay.protocol.messages import Commit, CommitAnswer, Ended, Forward, NextJob
from blockrelay_worker.runs.kv_load import Loaded


@dataclass(frozen=True, slots=True)
class Wake:
    """A job stream may have something new: call CLAIM."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The answers of one COMMIT call, each with its commit."""

    answers: tuple[tuple[Commit, CommitAnswer], ...]


@dataclass(frozen=True, slots=True)
class Orphan:
    """A run that Redis places on this worker and that is not here: the reply of a CLAIM was lost. It must run again."""

    request_id: str
    run_id: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """The control Redis was restarted: it is another process than before."""


@dataclass(frozen=True, slots=True)
class Gone:
    """This worker must end its registration; `why` is the reason, in words for the log.

    It was declared dead, its payload inbox is gone, or the plan gives it another stage that it cannot load beside this
    one.
    """

    why: str


class Departure:
    """A worker's leave for another stage, which can be called off until it has begun. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_off = self._has_begun = False

    def begin(self) -> bool:
        """Begins the leave; returns False if it was called off."""
        with self._lock:
            self._has_begun = not self._is_off
            return self._has_begun

    def call_off(self) -> bool:
        """Calls the leave off; returns False if it has begun."""
        with self._lock:
            self._is_off = not self._has_begun
            return self._is_off


@dataclass(frozen=True, slots=True)
class MovesOn:
    """The workers of another plan serve: this one must pass its requests on to them and end its registration."""

    departure: Departure


@dataclass(frozen=True, slots=True)
class DeviceEnded:
    """The process of this worker's device has ended. It wakes the engine, which then handles the loss at once."""


Event = Wake | Verdicts | Orphan | Restarted | Gone | MovesOn | DeviceEnded | NextJob | Ended | Forward | Loaded

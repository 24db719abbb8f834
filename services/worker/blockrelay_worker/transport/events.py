"""What Redis and the threads beside the engine tell it."""

from dataclasses import dataclass
from typing import Protocol

from blockrelay.protocol.messages import Commit, CommitAnswer, Ended, Forward, NextJob


@dataclass(frozen=True, slots=True)
class Wake:
    """A job stream has something new: CLAIM."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """COMMIT answered."""

    answers: tuple[tuple[Commit, CommitAnswer], ...]


@dataclass(frozen=True, slots=True)
class Orphan:
    """Redis says this run is on us, and we do not know it: the reply of a CLAIM was lost."""

    request: str
    run: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """The control Redis is another process than before."""


@dataclass(frozen=True, slots=True)
class Gone:
    """We were declared dead, or the plan gives us another stage."""

    why: str


@dataclass(frozen=True, slots=True)
class DeviceEnded:
    """The process of our device is lost: no step needs to find that out."""


TransportEvent = Wake | Verdicts | Orphan | Restarted | Gone | DeviceEnded | NextJob | Ended | Forward


class EventSink(Protocol):
    """Takes events, from any thread."""

    def put(self, event: TransportEvent) -> None: ...

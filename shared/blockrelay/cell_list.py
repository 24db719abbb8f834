"""Reads the file of cells: their Redis addresses, and dated lists of the share of new requests that each cell gets.

    {"cells": {"c0": {"redis_url": "redis://a:6379/0", "payload_redis_url": "redis://b:6379/0"},
               "c1": {"redis_url": "redis://c:6379/0"}},
     "lists": [{"version": 1, "since": "2026-11-01T00:00:00Z", "weights": {"c0": 1}},
               {"version": 2, "since": "2026-11-23T12:00:00Z", "weights": {"c0": 1, "c1": 2}}]}

The newest list whose date has come is in force. A cell that is not in it, or has weight 0, drains: it gets no new
requests, and clients can still read its old ones. A cell that is no longer among `cells` is closed. Earlier lists must
stay in the file while a request with a key, or a session, may be in the cell that they chose (`CellFile.over_at`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

from blockrelay.block_folder.strict_json import Fields
from blockrelay.bounded_file import read_bounded
from blockrelay.errors import UsageError
from blockrelay.protocol.encoding.request_ids import CELL
from blockrelay.redis.connections import checked_url
from blockrelay.settings import GatewaySettings

MAX_BYTES = 1 << 20
#: Longest time in seconds that a request takes before its retention begins. A list may be needed for this time plus the
#: retention of requests with a key, from the date of the next list on.
LONGEST_REQUEST_S = 24 * 3600
#: Largest version, and largest weight.
LARGEST = 1_000_000_000


@dataclass(frozen=True, slots=True)
class CellPlace:
    """The Redis addresses of a cell."""

    name: str
    redis_url: str
    payload_redis_url: str | None = None  # None: the control Redis serves as payload Redis too


@dataclass(frozen=True, slots=True)
class CellList:
    """A list of cells: the share of new requests that each cell gets from a date on."""

    version: int
    since: float  # Unix seconds
    weights: Mapping[str, int]  # by the name of the cell; 0: no new requests


@dataclass(frozen=True, slots=True)
class CellFile:
    """The content of the file of cells."""

    places: Mapping[str, CellPlace]  # by the name of the cell
    lists: tuple[CellList, ...]  # in the order of their versions, which is that of their dates

    def home(self, name: str) -> str:
        """Returns the gateway's own cell: `name` if the file has it, else the first cell."""
        return name if name in self.places else next(iter(self.places))

    def in_force(self, now: float) -> CellList:
        """Returns the newest list that has begun by `now` (Unix seconds); the first list if none has."""
        return next((one for one in reversed(self.lists) if one.since <= now), self.lists[0])

    def weights(self, now: float) -> dict[str, int]:
        """Returns the weights above 0 of the cells that get new requests at `now` (Unix seconds), by name.

        If the list in force has weights for closed cells only, they are those of the last list of the file.
        """
        for one in (self.in_force(now), self.lists[-1]):
            if present := {name: weight for name, weight in one.weights.items() if weight and name in self.places}:
                return present
        raise AssertionError("read_cells checks that the newest list names cells of the file")

    def over_at(self, retention_s: float) -> dict[int, float]:
        """Returns, by version, when each list but the newest can be removed from the file (Unix seconds).

        From then on, no request with a key and no session that the list sent to a cell is kept. `retention_s` is the
        time in seconds for which they are kept.
        """
        return {one.version: after.since + retention_s + LONGEST_REQUEST_S for one, after in pairwise(self.lists)}

    def former(self, now: float, retention_s: float) -> list[CellList]:
        """Returns the lists before the one in force that are not over yet, newest first.

        `now` is in Unix seconds; `retention_s` is as in `over_at`.
        """
        over, current = self.over_at(retention_s), self.in_force(now).version
        return [one for one in reversed(self.lists) if one.version < current and over[one.version] > now]


def cells_of(settings: GatewaySettings) -> CellFile:
    """Returns the cells of the settings' file, or the one cell of the settings. Raises UsageError for a wrong file."""
    if settings.cells:
        return read_cells(settings.cells)
    place = CellPlace(settings.cell, settings.control_redis, settings.payload_redis)
    return CellFile({place.name: place}, (CellList(0, 0.0, {place.name: 1}),))


def read_cells(path: Path) -> CellFile:
    """Reads and checks a file of cells. Raises UsageError, one line that names the file and the field."""
    fields = Fields.parse(read_bounded(path, MAX_BYTES), str(path), UsageError)
    cells = fields.nested("cells")
    places = {name: _place(cells, name) for name in cells.names()}
    if not places:
        fields.fail("cells: there is none")
    lists = tuple(_list(one) for one in fields.nested_list("lists"))
    fields.done()
    if not lists:
        fields.fail("lists: there is none")
    for before, after in pairwise(lists):
        if after.version <= before.version or after.since < before.since:
            fields.fail(f"lists: version {after.version} must be newer than version {before.version} before it")
    for name, weight in lists[-1].weights.items():
        if weight and name not in places:
            fields.fail(f"lists: version {lists[-1].version} sends requests to {name!r}, which is not among the cells")
    return CellFile(MappingProxyType(places), lists)


def check_successor(before: CellFile, after: CellFile, where: Path, *, now: float, retention_s: float) -> None:
    """Raises UsageError, one line, if a running gateway may not replace `before` by `after`, which is from `where`.

    It may not if keys or sessions still go by a list of `before` that `after` lacks, has changed or counts as over: one
    key could then start two requests. `now` is in Unix seconds; `retention_s` is as in `CellFile.over_at`.
    """
    lists = {one.version: one for one in after.lists}
    looked_into = {one.version for one in (after.in_force(now), *after.former(now, retention_s))}
    for one in (before.in_force(now), *before.former(now, retention_s)):
        if one.version not in lists:
            problem = "is missing: keys and sessions still go by it"
        elif lists[one.version] != one:
            problem = "is not what it was: leave it, and add a list with a higher version"
        elif one.version not in looked_into:
            problem = "would be over at once: the date of the list after it is too far back"
        else:
            continue
        raise UsageError(f"{where}: lists: version {one.version} {problem}")


def _place(cells: Fields, name: str) -> CellPlace:
    fields = cells.nested(name)
    if not re.fullmatch(CELL, name):
        fields.fail("the name of a cell has 1 to 32 characters of a-z 0-9 -")
    payload = _url(fields, "payload_redis_url") if fields.has("payload_redis_url") else None
    place = CellPlace(name, _url(fields, "redis_url"), payload)
    fields.done()
    return place


def _url(fields: Fields, name: str) -> str:
    try:
        return checked_url(fields.text(name))
    except UsageError as error:
        fields.fail(f"{name}: {error}")


def _list(fields: Fields) -> CellList:
    version, since = fields.integer("version", minimum=1), fields.text("since")
    try:
        moment = datetime.fromisoformat(since)
    except ValueError:
        fields.fail(f"since must be a date and time such as 2026-11-23T12:00:00Z, not {since!r}")
    if moment.tzinfo is None:
        fields.fail(f"since needs a time zone (a Z at its end), not {since!r}")
    nested = fields.nested("weights")
    weights = {name: nested.integer(name) for name in nested.names()}
    fields.done()
    for name, value in (("version", version), *weights.items()):
        if value > LARGEST:
            fields.fail(f"{name}: at most {LARGEST}, not {value if value < LARGEST**2 else 'so much'}")
    if not any(weights.values()):
        fields.fail("weights: a cell must have a weight above 0")
    return CellList(version, moment.timestamp(), MappingProxyType(weights))

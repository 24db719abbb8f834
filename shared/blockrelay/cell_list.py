"""The file of cells: where they are, and which of them new requests go to, by dated lists.

    {"cells": {"c0": {"redis_url": "redis://a:6379/0", "payload_redis_url": "redis://b:6379/0"},
               "c1": {"redis_url": "redis://c:6379/0"}},
     "lists": [{"version": 1, "since": "2026-11-01T00:00:00Z", "weights": {"c0": 1}},
               {"version": 2, "since": "2026-11-23T12:00:00Z", "weights": {"c0": 1, "c1": 2}}]}

The newest list whose time has come is in force. A cell that is not in it, or has the weight 0, gets nothing new, and is
served as before: it drains. One that is no longer among `cells` is closed. Earlier lists stay in the file while a
request under a key, or a session, may be where they said (`LOOKED_INTO_S`).
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
#: How long a request may take, at most, before its retention begins. A list is looked into for that and the retention
#: of requests with a key, from the moment on at which the next one came.
LONGEST_REQUEST_S = 24 * 3600
#: Of a version, and of a weight: both are counted with.
LARGEST = 1_000_000_000


@dataclass(frozen=True, slots=True)
class CellPlace:
    """Where a cell is. No `payload_redis_url`: its control Redis has the rows, too."""

    name: str
    redis_url: str
    payload_redis_url: str | None = None


@dataclass(frozen=True, slots=True)
class CellList:
    """`since`: Unix seconds. `weights`: what share of new requests each cell gets, 0 for none."""

    version: int
    since: float
    weights: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CellFile:
    """`lists` by version, which is by date."""

    places: Mapping[str, CellPlace]
    lists: tuple[CellList, ...]

    def home(self, name: str) -> str:
        """The cell that a gateway counts as its own: `name`, if it is one of them."""
        return name if name in self.places else next(iter(self.places))

    def in_force(self, now: float) -> CellList:
        """The newest list of which `now` (Unix seconds) is not before; the first one before all of them."""
        return next((one for one in reversed(self.lists) if one.since <= now), self.lists[0])

    def weights(self, now: float) -> dict[str, int]:
        """Of the cells that new requests go to."""
        for one in (self.in_force(now), self.lists[-1]):
            if there := {name: weight for name, weight in one.weights.items() if weight and name in self.places}:
                return there
        raise AssertionError("the newest list names cells that are there")

    def over_at(self, retention_s: float) -> dict[int, float]:
        """By version, when nothing is kept any more that a list may have said the place of; none for the newest."""
        return {one.version: after.since + retention_s + LONGEST_REQUEST_S for one, after in pairwise(self.lists)}

    def former(self, now: float, retention_s: float) -> list[CellList]:
        """Those before the one in force that may have said where something is that is kept for `retention_s`, newest
        first."""
        over, current = self.over_at(retention_s), self.in_force(now).version
        return [one for one in reversed(self.lists) if one.version < current and over[one.version] > now]


def cells_of(settings: GatewaySettings) -> CellFile:
    """Those of the file, or the one that the settings name. Raises UsageError for a file that cannot be used."""
    if settings.cells:
        return read_cells(settings.cells)
    place = CellPlace(settings.cell, settings.control_redis, settings.payload_redis)
    return CellFile({place.name: place}, (CellList(0, 0.0, {place.name: 1}),))


def read_cells(path: Path) -> CellFile:
    """Raises UsageError, one line that names the file and the field."""
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
    """Raise UsageError, one line, if `after` cannot take the place of `before`: keys and sessions may still go by a
    list that it has not, or has otherwise, or takes to be over. One key would be two requests. `where` it was read."""
    lists = {one.version: one for one in after.lists}
    looked_into = {one.version for one in (after.in_force(now), *after.former(now, retention_s))}
    for one in (before.in_force(now), *before.former(now, retention_s)):
        if one.version not in lists:
            problem = "is missing: keys and sessions still go by it"
        elif lists[one.version] != one:
            problem = "is not what it was: leave it, and add a list with a higher version"
        elif one.version not in looked_into:
            problem = "would be over at once: the date of the list behind it lies too far back"
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
    found = fields.nested("weights")
    weights = {name: found.integer(name) for name in found.names()}
    fields.done()
    for name, value in (("version", version), *weights.items()):
        if value > LARGEST:
            fields.fail(f"{name}: at most {LARGEST}, not {value if value < LARGEST**2 else 'so much'}")
    if not any(weights.values()):
        fields.fail("weights: a cell must have a weight above 0")
    return CellList(version, moment.timestamp(), MappingProxyType(weights))

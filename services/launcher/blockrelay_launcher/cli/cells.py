"""The command `blockrelay cells`: shows which list of a file of cells is in force, and the load of each cell."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from blockrelay.cell_list import CellFile, CellPlace, check_successor, read_cells
from blockrelay.errors import RedisTrouble, UsageError
from blockrelay.protocol.keys import Keys
from blockrelay.redis.address import shown
from blockrelay.redis.client import connect
from blockrelay.settings import GatewaySettings
from blockrelay_launcher.policy import CELL_ANSWER_S


@dataclass(frozen=True, slots=True)
class CellState:
    """The numbers of unfinished requests and workers of a cell; `error` says why they are unknown, or is empty."""

    place: CellPlace
    unfinished: int = 0
    workers: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class CellsState:
    """A file of cells and the states of its cells at one time."""

    file: CellFile
    cells: tuple[CellState, ...]
    now: float
    """Time of the reading, in Unix seconds."""
    retention_s: float
    """Seconds that requests with an idempotency key are kept, by the settings of this process."""


def read(path: Path | None, before: Path | None = None) -> CellsState:
    """Reads the file of cells (`path` None: BLOCKRELAY_CELLS) and asks its cells.

    Raises UsageError if no file is named, and for a file that gateways would refuse, on its own or as successor of the
    file `before`. A cell that does not answer is no error: its state says why.
    """
    settings = GatewaySettings()
    path = path or settings.cells
    if path is None:
        raise UsageError("which file? give it, or set BLOCKRELAY_CELLS")
    file, now = read_cells(path), time.time()
    if before is not None:
        check_successor(read_cells(before), file, path, now=now, retention_s=settings.keyed_retention_s)
    with ThreadPoolExecutor() as pool:
        cells = tuple(pool.map(_ask, file.places.values()))
    return CellsState(file, cells, now, settings.keyed_retention_s)


def _ask(place: CellPlace) -> CellState:
    """Reads the state of one cell from its control Redis."""
    keys = Keys(place.name)
    try:
        with connect(place.redis_url, cell=place.name, answer_s=CELL_ANSWER_S) as client:
            unfinished, workers = (cast(Any, client.zcard(key)) for key in (keys.running, keys.workers))
    except RedisTrouble as error:
        return CellState(place, error=str(error))
    return CellState(place, unfinished, workers)


def show(state: CellsState, console: Console | None = None) -> None:
    """Prints the state as a table and sentences; addresses are shown without users and passwords."""
    console, file = console or Console(), state.file
    table = Table("cell", "new requests", "under way", "workers", "control Redis", "payload Redis")
    weights = file.weights(state.now)
    for cell in state.cells:
        place, share = cell.place, weights.get(cell.place.name, 0) / sum(weights.values())
        table.add_row(
            place.name,
            f"{share:.0%}" if share else "none",
            *(("?", "?") if cell.error else (str(cell.unfinished), str(cell.workers))),
            shown(place.redis_url),
            shown(place.payload_redis_url) if place.payload_redis_url else "the same",
        )
    console.print(table)
    for cell in state.cells:
        if cell.error:
            console.print(f"{cell.place.name}: {cell.error}", soft_wrap=True, markup=False)
    for line in lists(state):
        console.print(line, soft_wrap=True, highlight=False)


def lists(state: CellsState) -> list[str]:
    """Returns a sentence about each list of the file, the newest first."""
    file, over = state.file, state.file.over_at(state.retention_s)
    current = file.in_force(state.now).version
    sentences: list[str] = []
    for one in reversed(file.lists):
        if one.version == current:
            line = f"is in force since {_date(one.since)}"
        elif one.version > current:
            line = f"comes into force at {_date(one.since)}"
        elif over[one.version] > state.now:
            line = f"is looked into for keys and sessions until {_date(over[one.version])}"
        else:
            line = "is over and may be taken out"
        sentences.append(f"list {one.version} {line}")
    return sentences


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")

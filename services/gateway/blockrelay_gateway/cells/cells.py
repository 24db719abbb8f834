"""All cells of a gateway, by the list of cells in a file, which is read again whenever it changes."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from blockrelay.bounded_file import file_stamp
from blockrelay.cell_list import CellFile, CellPlace, check_successor, read_cells
from blockrelay.errors import NotFound, RedisTrouble, UsageError
from blockrelay.observability import logs
from blockrelay.observability.metrics.gateway import Question
from blockrelay.protocol.encoding.request_ids import RequestId
from blockrelay_gateway.cells.cell import Cell
from blockrelay_gateway.policy import CELL_FILE_POLL_S


class Cells:
    """The cells of one gateway by name. `home` is its own cell, which has the requests without a cell in their id."""

    def __init__(
        self,
        file: CellFile,
        make: Callable[[CellPlace], Cell],
        home: Cell,
        *,
        path: Path | None,
        retention_s: float,
        broken: asyncio.Event,
    ) -> None:
        """Makes all cells of `file` but `home` with `make`.

        `path` is that of the file (None: there is none), `retention_s` the retention of keyed requests; `broken` is set
        when background work of any cell fails.
        """
        self.file, self.home, self.broken = file, home, broken
        self._make, self._path, self._retention_s = make, path, retention_s
        self._stamp = path and file_stamp(path)
        self._places = dict(file.places)  # the addresses with which the cells were made
        self._moved: list[str] = []
        others = {name: make(place) for name, place in file.places.items() if name != home.name}
        self._cells = {home.name: home, **others}
        self._running: dict[str, AsyncExitStack] = {}

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._cells.values())

    @property
    def several(self) -> bool:
        """True if the cells come from a file, so that there are several, or may have been."""
        return self._path is not None

    def get(self, name: str) -> Cell | None:
        """The cell of this name; None if this gateway does not serve it, or no longer."""
        return self._cells.get(name)

    def named(self, name: str) -> Cell:
        """The cell of this name. Raises NotFound if this gateway does not serve it."""
        if cell := self._cells.get(name):
            return cell
        raise NotFound(f"there is no cell {name!r} here, only {', '.join(self._cells)}", param="cell")

    def of_id(self, request_id: RequestId) -> Cell:
        """The cell of a request id. Raises NotFound if this gateway does not serve it."""
        return self.named(request_id.cell) if request_id.cell else self.home

    def count_error(self, error: RedisTrouble) -> None:
        """Counts and logs a Redis error that a client gets, for the cell that it comes from."""
        (self._cells.get(error.cell or "") or self.home).links.watch.count_error(error)

    def stopped(self) -> list[str]:
        """Names of the background work that has ended although the gateway runs."""
        return [f"{cell.name}: {work}" if self.several else work for cell in self for work in cell.background.stopped()]

    async def readiness(self, question: Question) -> tuple[bool, list[str]]:
        """True if any cell can do what `question` asks, and the reasons why other cells cannot."""
        cells = list(self)
        checks = (cell.readiness.gaps() if question == "tokens" else cell.readiness.obstacles() for cell in cells)
        reasons = await asyncio.gather(*checks)
        named = [
            f"{cell.name}: {gap}" if self.several else gap
            for cell, gaps in zip(cells, reasons, strict=True)
            for gap in gaps
        ]
        return not all(reasons), named

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the background work of all cells, and watches the file, while the context is open.

        At the end it closes the connections to Redis. It may be opened once.
        """
        if self._path:
            self._say(closed=[])
        watching = asyncio.create_task(self.watch(), name="cells") if self._path else None
        try:
            for cell in self:
                await self._start(cell)
            yield
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            await asyncio.gather(*(running.aclose() for running in self._running.values()))

    def end_status_events(self) -> None:
        """Ends the streams of status events, which never end by themselves."""
        for cell in self:
            cell.status_events.close()

    def close(self) -> None:
        """Ends all readers in all cells, because the gateway ends; the requests go on."""
        for cell in self:
            cell.close()

    async def look(self) -> None:
        """Reads the file again if it has changed; starts cells that are new and closes cells that are gone.

        A file that cannot be used, or that cannot follow the one before, is logged and changes nothing. The home cell
        stays until the gateway ends, and addresses of cells that exist do not change. It may be called only while
        `running` is open.
        """
        if self._path is None or (stamp := file_stamp(self._path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            file = read_cells(self._path)
            check_successor(self.file, file, self._path, now=time.time(), retention_s=self._retention_s)
        except UsageError as error:
            logs.get().error("CELLS_UNREADABLE", error=str(error))
            return
        own = self.home.name
        if own not in file.places:
            file = replace(file, places={own: self._places[own], **file.places})
            logs.get().warning("CELL_KEPT", cell=own, advice="a gateway keeps its own cell until it is restarted")
        new = [self._make(place) for name, place in file.places.items() if name not in self._cells]
        gone = [cell for cell in self if cell.name not in file.places]
        for cell in new:
            await self._start(cell)
        self._cells = {cell.name: cell for cell in (*self, *new) if cell not in gone}
        self._places = {name: self._places.get(name, place) for name, place in file.places.items()}
        self.file = file
        for cell in gone:
            await self._running.pop(cell.name).aclose()
        self._say(closed=[cell.name for cell in gone])

    @property
    def version(self) -> int:
        """Version of the list of cells that is in force; 0 without a file."""
        return self.file.in_force(time.time()).version

    def _say(self, *, closed: list[str]) -> None:
        """Logs the list of cells, and a warning for addresses that have changed since the start."""
        lists = {"version": self.version, "newest": self.file.lists[-1].version}
        logs.get().info("CELLS_READ", **lists, home=self.home.name, cells=list(self._cells), closed=closed)
        moved = [name for name, place in self.file.places.items() if place != self._places[name]]
        if moved and moved != self._moved:
            logs.get().warning("CELLS_MOVED", cells=moved, advice="addresses are read at start: restart the gateways")
        self._moved = moved

    async def _start(self, cell: Cell) -> None:
        running = self._running[cell.name] = AsyncExitStack()
        await running.enter_async_context(cell.running())

    async def watch(self) -> None:
        """Looks at the file every CELL_FILE_POLL_S seconds until cancelled."""
        while True:
            await asyncio.sleep(CELL_FILE_POLL_S)
            await self.look()

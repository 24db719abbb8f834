"""All cells of a gateway, by the file of cells, which is read again whenever it changes."""

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

#: How often the file is looked at.
LOOK_S = 1.0


class Cells:
    """`home` is the cell that the gateway counts as its own: requests without a cell in their id are looked for
    there."""

    def __init__(
        self,
        found: CellFile,
        make: Callable[[CellPlace], Cell],
        home: Cell,
        *,
        path: Path | None,
        retention_s: float,
        broken: asyncio.Event,
    ) -> None:
        """`make` a cell, but for `home`; `path` of the file that `found` was read from; `retention_s` of requests with
        a key; `broken` is set when background work of any cell has failed."""
        self.file, self.home, self.broken = found, home, broken
        self._make, self._path, self._retention_s = make, path, retention_s
        self._stamp = path and file_stamp(path)
        self._places = dict(found.places)  # by which the cells were made
        self._moved: list[str] = []
        others = {name: make(place) for name, place in found.places.items() if name != home.name}
        self._cells = {home.name: home, **others}
        self._running: dict[str, AsyncExitStack] = {}

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._cells.values())

    @property
    def several(self) -> bool:
        """Whether there is a choice, or may have been one."""
        return self._path is not None

    def get(self, name: str) -> Cell | None:
        """None for one that is not, or no longer, among ours."""
        return self._cells.get(name)

    def named(self, name: str) -> Cell:
        """Raises NotFound for one that is not among ours."""
        if found := self._cells.get(name):
            return found
        raise NotFound(f"there is no cell {name!r} here, only {', '.join(self._cells)}", param="cell")

    def of_id(self, asked: RequestId) -> Cell:
        """The cell of a request. Raises NotFound."""
        return self.named(asked.cell) if asked.cell else self.home

    def met(self, error: RedisTrouble) -> None:
        """Trouble that a client is told of: it is counted and logged as that of its cell."""
        (self._cells.get(error.cell or "") or self.home).watch.met(error)

    def stopped(self) -> list[str]:
        """The names of background work that has ended although the gateway runs."""
        return [f"{cell.name}: {work}" if self.several else work for cell in self for work in cell.background.stopped()]

    async def readiness(self, question: Question) -> tuple[bool, list[str]]:
        """Whether any cell can do what is asked, and what the others, or all, lack."""
        cells = list(self)
        asked = (cell.readiness.gaps() if question == "tokens" else cell.readiness.obstacles() for cell in cells)
        found = await asyncio.gather(*asked)
        named = [
            f"{cell.name}: {gap}" if self.several else gap
            for cell, gaps in zip(cells, found, strict=True)
            for gap in gaps
        ]
        return not all(found), named

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Background work of all cells from start to end, and the file is watched."""
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
        """End the streams of those who follow what stages do: no answer ends them."""
        for cell in self:
            cell.status_events.close()

    def close(self) -> None:
        """No reader is waited for any more; requests go on."""
        for cell in self:
            cell.close()

    async def look(self) -> None:
        """Read the file again if it has changed. One that cannot be used, or not behind the one before, is logged, and
        what we have stays in force. Our own cell stays until we end, and an address is not taken again."""
        if self._path is None or (stamp := file_stamp(self._path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            found = read_cells(self._path)
            check_successor(self.file, found, self._path, now=time.time(), retention_s=self._retention_s)
        except UsageError as error:
            logs.get().error("CELLS_UNREADABLE", error=str(error))
            return
        own = self.home.name
        if own not in found.places:
            found = replace(found, places={own: self._places[own], **found.places})
            logs.get().warning("CELL_KEPT", cell=own, advice="it is our own until we are started as one of another")
        come = [self._make(place) for name, place in found.places.items() if name not in self._cells]
        gone = [cell for cell in self if cell.name not in found.places]
        for cell in come:
            await self._start(cell)
        self._cells = {cell.name: cell for cell in (*self, *come) if cell not in gone}
        self._places = {name: self._places.get(name, place) for name, place in found.places.items()}
        self.file = found
        for cell in gone:
            await self._running.pop(cell.name).aclose()
        self._say(closed=[cell.name for cell in gone])

    @property
    def version(self) -> int:
        """Of the list in force; 0 without a file."""
        return self.file.in_force(time.time()).version

    def _say(self, *, closed: list[str]) -> None:
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
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

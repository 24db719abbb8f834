"""All cells of a gateway, by the file of cells, which is read again whenever it changes."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from blockrelay.bounded_file import file_stamp
from blockrelay.errors import NotFound, UsageError
from blockrelay.observability import logs
from blockrelay.observability.metrics.gateway import Question
from blockrelay.protocol.encoding.request_ids import RequestId
from blockrelay_gateway.cells.cell import Cell
from blockrelay_gateway.cells.cell_list import CellFile, CellPlace, read_cells

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
        broken: asyncio.Event,
    ) -> None:
        """`make` a cell, but for `home`; `path` of the file that `found` was read from; `broken` is set when background
        work of any cell has failed."""
        self.file, self.home, self.broken = found, home, broken
        self._make, self._path = make, path
        self._stamp = path and file_stamp(path)
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

    def close(self) -> None:
        """No reader is waited for any more; requests go on."""
        for cell in self:
            cell.close()

    async def look(self) -> None:
        """Read the file again if it has changed. One that cannot be used, or does not know our own cell, is logged, and
        what we have stays in force. The address of a cell is taken when it comes, and not again."""
        if self._path is None or (stamp := file_stamp(self._path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            found = read_cells(self._path)
            if self.home.name not in found.places:
                raise UsageError(
                    f"{self._path}: it has no cell {self.home.name!r}, which this gateway counts as its own"
                )
        except UsageError as error:
            logs.get().error("CELLS_UNREADABLE", error=str(error))
            return
        moved = [n for n, place in found.places.items() if n in self._cells and place != self.file.places[n]]
        come = [self._make(place) for name, place in found.places.items() if name not in self._cells]
        gone = [cell for cell in self if cell.name not in found.places]
        for cell in come:
            await self._start(cell)
        self._cells = {cell.name: cell for cell in (*self, *come) if cell not in gone}
        self.file = found
        for cell in gone:
            await self._running.pop(cell.name).aclose()
        logs.get().info(
            "CELLS_READ", version=found.lists[-1].version, cells=list(self._cells), closed=[cell.name for cell in gone]
        )
        if moved:
            logs.get().warning("CELLS_MOVED", cells=moved, advice="addresses are read at start: restart the gateways")

    async def _start(self, cell: Cell) -> None:
        running = self._running[cell.name] = AsyncExitStack()
        await running.enter_async_context(cell.running())

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()


def weights_now(found: CellFile) -> dict[str, int]:
    """Of the cells that new requests go to now."""
    for one in (found.in_force(time.time()), found.lists[-1]):
        if there := {name: weight for name, weight in one.weights.items() if weight and name in found.places}:
            return there
    raise AssertionError("the newest list names cells that are there")

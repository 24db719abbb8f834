"""Runs the background work of a gateway. Work that ends by itself is a failure that only a restart mends."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from blockrelay.observability import logs

#: A coroutine function that runs until it is cancelled.
Work = Callable[[], Coroutine[Any, Any, None]]


class Background:
    """Background work (`works`, by name); the event `broken` is set when one has raised an error."""

    def __init__(self, works: Mapping[str, Work], broken: asyncio.Event) -> None:
        self.works, self.broken = dict(works), broken
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs all work while the context is open, and cancels it at the end. It may be opened once."""
        for name, work in self.works.items():
            task = asyncio.create_task(work(), name=name)
            task.add_done_callback(self._ended)
            self._tasks.append(task)
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def stopped(self) -> list[str]:
        """Names of the work that has ended, while `running` is open; none before that."""
        return [task.get_name() for task in self._tasks if task.done()]

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logs.get().error("BACKGROUND_WORK_FAILED", work=task.get_name(), error=repr(error), exc_info=error)
            self.broken.set()

"""Work in the background for as long as a gateway runs. When one piece ends by itself, only a restart helps."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from blockrelay.observability import logs

#: Each ends when it is cancelled.
Work = Callable[[], Coroutine[Any, Any, None]]


class Background:
    """`works` by name; `broken` is set when one has failed."""

    def __init__(self, works: Mapping[str, Work], broken: asyncio.Event) -> None:
        self.works, self.broken = dict(works), broken
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """From start to end."""
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
        """The names of what has ended although the gateway runs."""
        return [task.get_name() for task in self._tasks if task.done()]

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logs.get().error("BACKGROUND_WORK_FAILED", work=task.get_name(), error=repr(error), exc_info=error)
            self.broken.set()

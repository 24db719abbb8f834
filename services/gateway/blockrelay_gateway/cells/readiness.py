"""Checks if a cell accepts requests and can produce tokens, and sets the cell's gauges."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

from blockrelay.errors import RedisTrouble
from blockrelay.protocol.plan import Plan, WorkerInfo, cell_load, missing_stages
from blockrelay.redis.protocol_check import read_gap_async
from blockrelay.redis.registry import read_plan_async, read_workers_async
from blockrelay_gateway.draining.drain import Drain
from blockrelay_gateway.policy import OBSTACLE_FRESH_S, PROBE_REDIS_S, READINESS_FRESH_S
from blockrelay_gateway.streaming.cell_links import CellLinks


class _Remembered:
    """The answer of `ask`, kept for READINESS_FRESH_S or OBSTACLE_FRESH_S; callers at the same time share one check."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, list[str]]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[list[str]] | None = None
        self._answer: list[str] = []
        self._until = float("-inf")

    async def get(self) -> list[str]:
        """Returns the kept answer, or a new one if it is too old."""
        if time.monotonic() < self._until:
            return self._answer
        if self._asking is None:
            self._asking = asyncio.create_task(self._look(), name="readiness")
        return await asyncio.shield(self._asking)  # a caller that is cancelled does not cancel it for others

    async def _look(self) -> list[str]:
        try:
            self._answer = await self._ask()
        finally:
            self._asking = None
        self._until = time.monotonic() + (OBSTACLE_FRESH_S if self._answer else READINESS_FRESH_S)
        return self._answer


class Readiness:
    """The readiness of one cell for the served model; a gateway that ends (`drain`) is never ready."""

    def __init__(self, links: CellLinks, drain: Drain) -> None:
        self._client, self._keys, self._model = links.client, links.keys, links.model
        self._metrics, self._watch, self._drain = links.metrics, links.watch, drain
        self._known_obstacles = _Remembered(lambda: self._bounded(self._obstacles()))
        self._known_missing = _Remembered(lambda: self._bounded(self._missing()))
        self._set_at = float("-inf")
        #: True if a token could be produced at the last check of `watch`, and before the first one.
        self.serves = True
        self._read: tuple[Plan | None, list[WorkerInfo]] = None, []

    async def obstacles(self) -> list[str]:
        """The reasons why the cell accepts no requests, one sentence each; empty if it does."""
        if reason := self._drain.why_not_ready:
            return [reason]
        return await self._known_obstacles.get()

    async def gaps(self) -> list[str]:
        """The reasons why the cell can produce no token, one sentence each; empty if it can."""
        return await self.obstacles() or await self._known_missing.get()

    async def cell(self) -> tuple[Plan | None, list[WorkerInfo]]:
        """The plan and the workers of the cell, as they were within READINESS_FRESH_S; older where Redis cannot be
        read, or the gateway ends. No plan: there was none, or none could be read yet."""
        await self.gaps()
        return self._read

    async def watch(self) -> None:
        """Updates `serves` every READINESS_FRESH_S seconds until cancelled."""
        while True:
            self.serves = not await self.gaps()
            await asyncio.sleep(READINESS_FRESH_S)

    async def _bounded(self, reasons: Awaitable[list[str]]) -> list[str]:
        """The `reasons`, or one reason if Redis fails or does not answer within PROBE_REDIS_S."""
        try:
            async with asyncio.timeout(PROBE_REDIS_S):
                return await reasons
        except RedisTrouble as error:
            self._watch.count_error(error)
            return [error.plainly]
        except TimeoutError:
            return [f"Redis does not answer: nothing came within {PROBE_REDIS_S:.0f} s"]

    async def _obstacles(self) -> list[str]:
        gap = await read_gap_async(self._client, self._keys)
        return [gap] if gap else []

    async def _missing(self) -> list[str]:
        return missing_stages(*await self._cell())

    async def set_gauges(self) -> None:
        """Sets the gauges of the cell, at most once in READINESS_FRESH_S seconds.

        If Redis cannot be read, or the cell accepts nothing, the gauges of load keep their values. The gauge of
        readiness to accept is then 0, and that for tokens too, unless Redis failed after the workers were read.
        """
        if time.monotonic() - self._set_at < READINESS_FRESH_S:
            return
        self._set_at = time.monotonic()
        accepting = tokens = False
        try:
            async with asyncio.timeout(PROBE_REDIS_S):
                accepting = not await self.obstacles()
                if accepting:
                    plan, workers = await self._cell()
                    tokens = not missing_stages(plan, workers)
                    unfinished = cast(int, await cast(Any, self._client.zcard(self._keys.running)))
                    self._set_load(workers, unfinished)
        except (RedisTrouble, TimeoutError):
            self._metrics.redis_errors.inc()
            accepting = False
        self._metrics.ready.labels("accepting").set(accepting)
        self._metrics.ready.labels("tokens").set(tokens)

    async def _cell(self) -> tuple[Plan | None, list[WorkerInfo]]:
        plan = await read_plan_async(self._client, self._keys, self._model)
        self._read = plan, await read_workers_async(self._client, self._keys, self._model)
        return self._read

    def _set_load(self, workers: list[WorkerInfo], unfinished: int) -> None:
        load = cell_load(workers, unfinished)
        self._metrics.tell_load(running=load.running, waiting=load.waiting, kv_usage=load.kv_usage)

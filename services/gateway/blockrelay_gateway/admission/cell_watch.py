"""Watches a cell for a gateway: the control Redis' memory and clock, the cell's protocol and settings."""

import asyncio
import time
from typing import Any, cast

from blockrelay.errors import RedisTrouble
from blockrelay.observability import logs
from blockrelay.protocol.constants import YIELD_SHARE
from blockrelay.protocol.transitions import calls
from blockrelay.redis.cell_settings import CellSettings, read_cell_settings_async
from blockrelay.redis.protocol_check import read_gap_async
from blockrelay_gateway.admission.redis_memory import read_memory
from blockrelay_gateway.policy import (
    CONTROL_FULL_SHARE,
    FORGET_CALLS_A_POLL,
    FORGOTTEN_A_CALL,
    MEMORY_EXTRA_POLL_S,
    MEMORY_POLL_S,
)
from blockrelay_gateway.streaming.active_requests.active_request import ActiveRequest
from blockrelay_gateway.streaming.active_requests.gateway_lease import GatewayLease
from blockrelay_gateway.streaming.cell_links import CellLinks


def _steady_ms() -> float:
    """Milliseconds of a clock that is never set, and that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) * 1000


class CellWatch:
    """The state of a cell as its control Redis had it at the last poll; `watch` polls every MEMORY_POLL_S seconds.

    `full` says why no new request may be accepted, `protocol_gap` why nothing of the cell may be read or written. Both
    are empty while that is allowed. While there is a `protocol_gap`, the other values stay as they were.
    """

    def __init__(self, links: CellLinks, lease: GatewayLease) -> None:
        self._client, self._keys, self._scripts = links.client, links.keys, links.scripts
        self._metrics, self._watch, self._lease, self._cell = links.metrics, links.watch, lease, CellSettings()
        self._looked = float("-inf")
        self._again: asyncio.Task[None] | None = None  # an extra poll that has not begun
        self.full = self.protocol_gap = ""
        # Redis' clock (which decides about deadlines) minus the steady clock; until the first poll, this host's clock.
        self._clock_ahead_ms = time.time() * 1000 - _steady_ms()
        #: Requests of the cell that have not ended: the number of the last poll, and this gateway's changes since then.
        self.unfinished = 0

    @property
    def name(self) -> str:
        """The cell's name."""
        return self._keys.cell

    @property
    def retention_s(self) -> int:
        """Seconds for which the cell keeps an ended request."""
        return self._cell.retention_s

    def now_ms(self) -> int:
        """Redis' time in Unix milliseconds; changes of this host's clock do not matter."""
        return int(_steady_ms() + self._clock_ahead_ms)

    def accepted(self) -> None:
        """Counts a new request that ACCEPT has accepted for this gateway."""
        self.unfinished += 1

    def ended(self, active: ActiveRequest) -> None:
        """Counts the end of a request, if this gateway had counted its acceptance."""
        self.unfinished = max(0, self.unfinished - active.owned)

    async def watch(self) -> None:
        """Polls until cancelled."""
        while True:
            try:
                await self.poll()
                self._watch.worked("watch Redis")
            except RedisTrouble as error:
                self._watch.failed("watch Redis", error)
            await asyncio.sleep(MEMORY_POLL_S)

    async def poll(self) -> None:
        """Reads everything once. If memory is short, it forgets ended requests before new ones are refused.

        Raises RedisTrouble.
        """
        self._looked = time.monotonic()
        self.protocol_gap = await read_gap_async(self._client, self._keys)
        if self.protocol_gap:
            return
        used, limit, _ = await read_memory(self._client)
        if limit and used > YIELD_SHARE * limit:
            used = await self._make_room(used, limit)
        full = limit and used > CONTROL_FULL_SHARE * limit
        self._set_full(f"Redis uses {used >> 20} of {limit >> 20} MiB" if full else "", used, limit)
        seconds, micros = cast(tuple[int, int], await cast(Any, self._client.time()))
        self._clock_ahead_ms = seconds * 1000 + micros / 1000 - _steady_ms()
        self.unfinished = await cast(Any, self._client.zcard(self._keys.running))
        cell = await read_cell_settings_async(self._client, self._keys)
        if cell is not None and cell != self._cell:
            self._cell, self._lease.retention_s = cell, cell.retention_s

    def _set_full(self, full: str, used: int, limit: int) -> None:
        """Sets `full` and logs its beginning and its end: no other log line says why new requests are refused."""
        if full and not self.full:
            logs.get().warning("REDIS_MEMORY_SHORT", used=used, maxmemory=limit)
        if self.full and not full:
            logs.get().info("REDIS_MEMORY_ENOUGH", used=used, maxmemory=limit)
        self.full = full

    async def look_again(self) -> None:
        """Polls before a request is refused because memory is short: there may be room by now.

        The poll begins after this call, because one that has begun may have read the memory before there was room. It
        serves all callers that come until it begins, MEMORY_EXTRA_POLL_S seconds after the last poll or later. If Redis
        fails, that is counted, not raised.
        """
        if self._again is None:
            self._again = asyncio.create_task(self._look_soon(), name="look at Redis again")
        await asyncio.shield(self._again)

    async def _look_soon(self) -> None:
        try:
            await asyncio.sleep(max(0.0, self._looked + MEMORY_EXTRA_POLL_S - time.monotonic()))
        finally:
            self._again = None
        try:
            await self.poll()
        except RedisTrouble as error:
            self._watch.count_error(error)

    async def _make_room(self, used: int, limit: int) -> int:
        """Forgets ended requests, oldest first, until use is at most YIELD_SHARE of `limit`; returns the bytes in use.

        It stops earlier without further ended requests, or after FORGET_CALLS_A_POLL calls. Raises RedisTrouble.
        """
        before, forgotten, left = used, 0, 0
        for _ in range(FORGET_CALLS_A_POLL):
            gone, left = await self._scripts.run(calls.forget(FORGOTTEN_A_CALL))
            forgotten += gone
            used = (await read_memory(self._client)).used
            if gone < FORGOTTEN_A_CALL or used <= YIELD_SHARE * limit:
                break
        if forgotten:
            self._metrics.forgotten.inc(forgotten)
            logs.get().warning(
                "ENDED_REQUESTS_FORGOTTEN", requests=forgotten, left=left, used=before, used_now=used, maxmemory=limit
            )
        return used

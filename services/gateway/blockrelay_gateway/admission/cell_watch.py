"""What every gateway keeps an eye on: the control Redis' memory and clock, the cell's protocol and its settings."""

import asyncio
import time
from typing import Any, cast

import redis.asyncio

from blockrelay.errors import RedisTrouble
from blockrelay.observability import logs
from blockrelay.observability.metrics.gateway import GatewayMetrics
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.transitions import calls
from blockrelay.redis.cell_settings import CellSettings, read_cell_settings_async
from blockrelay.redis.client import AsyncScripts
from blockrelay.redis.errors import RedisWatch
from blockrelay.redis.protocol_check import read_gap_async
from blockrelay_gateway.admission.redis_memory import read_memory
from blockrelay_gateway.streaming.following.followed_request import FollowedRequest
from blockrelay_gateway.streaming.following.followers import Followers

#: Share of Redis' maxmemory above which nothing new is accepted: COMMIT must always fit.
FULL_SHARE = 0.70
#: Share above which requests that have ended are forgotten, BITE at a time, at most BITES times at one look.
YIELD_SHARE, BITE, BITES = 0.50, 128, 64
POLL_S = 1.0
#: A request that would be refused because memory is short has the memory looked at again, at most this often.
LOOKED_S = 0.1


def _steady_ms() -> float:
    """A clock that nobody sets, and that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) * 1000


class CellWatch:
    """`full` says why nothing new may be accepted, `protocol_gap` why nothing of the cell may be touched; both are
    empty when it may."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: Keys,
        scripts: AsyncScripts,
        followers: Followers,
        metrics: GatewayMetrics,
        watch: RedisWatch,
    ) -> None:
        self._client, self._keys, self._scripts, self._followers = client, keys, scripts, followers
        self._metrics, self._watch, self._cell = metrics, watch, CellSettings()
        self._looked = float("-inf")
        self._again: asyncio.Task[None] | None = None  # a look that has not begun
        self.full = self.protocol_gap = ""
        # Of Redis, whose clock decides about deadlines, before our steady one; until the first look, our host's.
        self._clock_ahead_ms = time.time() * 1000 - _steady_ms()
        #: Requests of the cell that have not ended, at the last look, with what this gateway has heard of since then.
        self.unfinished = 0

    @property
    def name(self) -> str:
        return self._keys.cell

    @property
    def retention_s(self) -> int:
        """Of the cell: how long a finished request can still be read."""
        return self._cell.retention_s

    def now_ms(self) -> int:
        """Redis' clock, whatever happens to our host's."""
        return int(_steady_ms() + self._clock_ahead_ms)

    def accepted(self) -> None:
        """One more is under way."""
        self.unfinished += 1

    def ended(self, followed: FollowedRequest) -> None:
        """One less, of those that this gateway has counted."""
        self.unfinished = max(0, self.unfinished - followed.owned)

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self.poll()
                self._watch.worked("watch Redis")
            except RedisTrouble as error:
                self._watch.failed("watch Redis", error)
            await asyncio.sleep(POLL_S)

    async def poll(self) -> None:
        """One look at everything. Requests that have ended are forgotten before anything new is refused.

        Raises RedisTrouble.
        """
        self._looked = time.monotonic()
        self.protocol_gap = await read_gap_async(self._client, self._keys)
        if self.protocol_gap:
            return
        used, most, _ = await read_memory(self._client)
        if most and used > YIELD_SHARE * most:
            used = await self._make_room(used, most)
        full = most and used > FULL_SHARE * most
        self._set_full(f"Redis uses {used >> 20} of {most >> 20} MiB" if full else "", used, most)
        seconds, micros = cast(tuple[int, int], await cast(Any, self._client.time()))
        self._clock_ahead_ms = seconds * 1000 + micros / 1000 - _steady_ms()
        self.unfinished = await cast(Any, self._client.zcard(self._keys.running))
        cell = await read_cell_settings_async(self._client, self._keys)
        if cell is not None and cell != self._cell:
            self._cell, self._followers.retention_s = cell, cell.retention_s

    def _set_full(self, full: str, used: int, most: int) -> None:
        """Says it when it begins and when it is over: meanwhile new requests are refused, and nothing else tells."""
        if full and not self.full:
            logs.get().warning("REDIS_MEMORY_SHORT", used=used, maxmemory=most)
        if self.full and not full:
            logs.get().info("REDIS_MEMORY_ENOUGH", used=used, maxmemory=most)
        self.full = full

    async def look_again(self) -> None:
        """Before a refusal because memory is short: there may be room by now. The look begins after this call, and is
        one for all who come meanwhile: another that is under way may have read the memory before what made room."""
        if self._again is None:
            self._again = asyncio.create_task(self._look_soon(), name="look at Redis again")
        await asyncio.shield(self._again)

    async def _look_soon(self) -> None:
        try:
            await asyncio.sleep(max(0.0, self._looked + LOOKED_S - time.monotonic()))
        finally:
            self._again = None
        try:
            await self.poll()
        except RedisTrouble as error:
            self._watch.met(error)

    async def _make_room(self, used: int, most: int) -> int:
        """Forget requests that have ended, oldest first, until half the memory is free; the bytes in use then."""
        before, forgotten, left = used, 0, 0
        for _ in range(BITES):
            gone, left = await self._scripts.run(calls.forget(BITE))
            forgotten += gone
            used = (await read_memory(self._client)).used
            if gone < BITE or used <= YIELD_SHARE * most:
                break
        if forgotten:
            self._metrics.forgotten.inc(forgotten)
            logs.get().warning(
                "ENDED_REQUESTS_FORGOTTEN", requests=forgotten, left=left, used=before, used_now=used, maxmemory=most
            )
        return used

"""Tensor results and KV of steps on the payload Redis: how much of it they may take, and their way to the readers.

ACCEPT keeps the books (`{cell}:results`): bytes are promised with the request and given back when its result is gone.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import redis.asyncio
from numpy.typing import NDArray

from blockrelay.auth.api_keys import Tenant
from blockrelay.errors import RedisTrouble
from blockrelay.protocol.constants import GIVEN_S, READ_RESULT_S
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.tensors import HEADER_BYTES, ResultReader
from blockrelay.redis.client import backoff_s
from blockrelay.redis.errors import RedisWatch
from blockrelay_gateway.admission.redis_memory import read_memory
from blockrelay_gateway.helpers.offload import by_size

#: Share of the payload Redis' memory that results may take, and where it is the control Redis too. As much again may
#: be on its way to readers; rows between stages, and pages, need the rest.
RESULTS_SHARE, RESULTS_SHARE_OF_CONTROL = 1 / 3, 1 / 8
#: What one tenant may take of that.
TENANT_SHARE = 1 / 2
#: Of a Redis without `maxmemory`, the share of its machine's memory that counts as one.
MACHINE_SHARE = 1 / 2
#: Share of the payload Redis' memory above which nothing new is accepted: rows between stages must fit.
FULL_SHARE = 0.90
POLL_S = 1.0
#: How long an answer waits for a payload Redis that does not give its result. Seconds.
RETRY_FOR_S = 60.0
#: Pages of KV in one command: a few megabytes.
FIELDS = 64
#: Bytes of a result in one command, whole values, and how many results are read at once: a part is there several times
#: on its way, in no budget.
RESULT_PART, READ_AT_ONCE = 1 << 20, 4


class Results:
    """The payload Redis as a gateway uses it. `full` says why nothing new may be accepted; it is empty when it may."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        payload: redis.asyncio.Redis,
        keys: Keys,
        watch: RedisWatch,
        *,
        of_its_own: bool,
    ) -> None:
        """`of_its_own`: the payload Redis is another one than the control Redis."""
        self._client, self._payload, self._keys, self._watch = client, payload, keys, watch
        self._of_its_own = of_its_own
        self._reading = asyncio.Semaphore(READ_AT_ONCE)
        self._most: int | None = None  # bytes of all results; None: nobody has looked
        self.full = ""

    @property
    def doubt(self) -> str:
        """What may be wrong where workers have stored a result and it is not there."""
        known = "this gateway knows none but the control Redis: workers may have been given another one"
        return "" if self._of_its_own else f" ({known})"

    async def watch(self) -> None:
        """Until cancelled: keep an eye on the payload Redis' memory."""
        while True:
            try:
                await self.look()
                self._watch.worked("watch the payload Redis")
            except RedisTrouble as error:
                self._watch.failed("watch the payload Redis", error)
            await asyncio.sleep(POLL_S)

    async def look(self) -> None:
        """One look at the payload Redis' memory. Raises RedisTrouble."""
        used, most, machine = await read_memory(self._payload)
        share = RESULTS_SHARE if self._of_its_own else RESULTS_SHARE_OF_CONTROL
        self._most = int(share * (most or MACHINE_SHARE * machine))
        full = self._of_its_own and most and used > FULL_SHARE * most
        self.full = f"the payload Redis uses {used >> 20} of {most >> 20} MiB" if full else ""

    async def limits(self, tenant: Tenant) -> tuple[int, int]:
        """Most bytes of all results, and of this tenant's; 0: no limit is known. Raises RedisTrouble."""
        if self._most is None:
            await self.look()
        most = self._most or 0
        return most, int(TENANT_SHARE * most) if tenant.name else 0

    async def fetch(
        self, request: str, into: NDArray[np.float16], *, now_ms: Callable[[], int], give_up: Callable[[], bool]
    ) -> bool:
        """Read what was stored for a request that has ended, its last rows, into an array; False when it is gone.
        READ_RESULT_S later it is.

        What was computed is worth waiting for: raises RedisTrouble when the payload Redis does not give it for a while,
        or when `give_up` says so, and WireError for a result that is none. `now_ms`: Redis' clock.
        """
        name, reader = self._keys.result(request), ResultReader(into)

        async def part(start: int, count: int) -> bytes:
            ask = partial(cast(Any, self._payload.getrange), name, start, start + count - 1)
            return await self._read(ask, give_up)

        async with self._reading:
            header = await part(0, HEADER_BYTES)
            if not header:
                return False
            size = reader.begin(header)
            for start in range(0, size, RESULT_PART):
                count = min(RESULT_PART, size - start)
                piece = await part(HEADER_BYTES + start, count)
                if len(piece) < count:  # its time was over
                    return False
                await by_size(count, reader.push, piece)
            reader.end()
        await self._read(lambda: cast(Any, self._payload.expire(name, READ_RESULT_S)), give_up)
        try:
            gone = {request: now_ms() + 1000 * READ_RESULT_S}
            await cast(Any, self._client.zadd(self._keys.results, gone, xx=True, lt=True))
        except RedisTrouble as error:  # the books then say so as late as of one that nobody reads
            self._watch.met(error)
        return True

    async def fetch_kv(self, request: str, fields: Sequence[str], *, give_up: Callable[[], bool]) -> list[bytes] | None:
        """The KV that a request asked for, by field; None when something of it is gone. Otherwise as `fetch`."""
        name, found = self._keys.kv_asked(request), list[bytes]()
        for start in range(0, len(fields), FIELDS):
            some = list(fields[start : start + FIELDS])
            pages = await self._read(partial(cast(Any, self._payload.hmget), name, some), give_up)
            if None in pages:
                return None
            found += pages
        if fields:
            await self._read(lambda: cast(Any, self._payload.expire(name, READ_RESULT_S)), give_up)
        return found

    async def give(self, request: str, pages: Mapping[str, bytes]) -> None:
        """Write KV that came with a request for the workers, unless there is some: another body may come under a known
        id. Where that fails they compute it."""
        name, fields = self._keys.kv_given(request), list(pages)
        try:
            if await cast(Any, self._payload.exists(name)):
                return
            for start in range(0, len(fields), FIELDS):
                some = {one: pages[one] for one in fields[start : start + FIELDS]}
                together = self._payload.pipeline(transaction=True)  # a gateway may die here: nothing stays for ever
                together.hset(name, mapping=cast(Any, some))
                together.expire(name, GIVEN_S)
                await cast(Any, together.execute())
        except RedisTrouble as error:
            self._watch.met(error)

    async def take_back(self, request: str) -> None:
        """What was given with a request is not needed any more."""
        try:
            await cast(Any, self._payload.unlink(self._keys.kv_given(request)))
        except RedisTrouble as error:  # it goes by itself
            self._watch.met(error)

    async def _read(self, ask: Callable[[], Awaitable[Any]], give_up: Callable[[], bool]) -> Any:
        until, attempt = time.monotonic() + RETRY_FOR_S, 0
        while True:
            try:
                return await ask()
            except RedisTrouble as error:
                self._watch.met(error)
                if time.monotonic() > until or give_up():
                    raise
                await asyncio.sleep(backoff_s(attempt))
                attempt += 1

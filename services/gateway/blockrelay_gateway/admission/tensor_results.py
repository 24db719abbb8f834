"""Tensor results on the payload Redis: how much of it they may take, and their way to the readers.

ACCEPT keeps the books (`{cell}:results`): bytes are promised with the request and given back when its result is gone.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

import redis.asyncio

from blockrelay.auth.api_keys import Tenant
from blockrelay.errors import RedisTrouble
from blockrelay.protocol.constants import READ_RESULT_S
from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import backoff_s
from blockrelay.redis.errors import RedisWatch
from blockrelay_gateway.admission.redis_memory import read_memory

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

    async def fetch(self, request: str, *, now_ms: Callable[[], int], give_up: Callable[[], bool]) -> bytes | None:
        """What was stored for a request that has ended; None when it is gone. READ_RESULT_S later it is.

        What was computed is worth waiting for: raises RedisTrouble when the payload Redis does not give it for a while,
        or when `give_up` says so. `now_ms`: Redis' clock.
        """
        until, attempt, name = time.monotonic() + RETRY_FOR_S, 0, self._keys.result(request)
        while True:
            try:
                value = await cast(Any, self._payload.getex(name, ex=READ_RESULT_S))
                break
            except RedisTrouble as error:
                self._watch.met(error)
                if time.monotonic() > until or give_up():
                    raise
                await asyncio.sleep(backoff_s(attempt))
                attempt += 1
        try:
            gone = {request: now_ms() + 1000 * READ_RESULT_S}
            await cast(Any, self._client.zadd(self._keys.results, gone, xx=True, lt=True))
        except RedisTrouble as error:  # the books then say so as late as of one that nobody reads
            self._watch.met(error)
        return value

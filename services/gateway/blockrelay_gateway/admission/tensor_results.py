"""Tensor results and KV of steps on the payload Redis: limits of their memory, writing and reading.

ACCEPT does the accounting (`{cell}:results`): it reserves a result's bytes with the request, and frees them when the
result is gone.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from blockrelay.auth.api_keys import Tenant
from blockrelay.errors import RedisTrouble
from blockrelay.protocol.constants import GIVEN_S, READ_RESULT_S
from blockrelay.protocol.tensors import HEADER_BYTES, ResultReader
from blockrelay.redis.client import backoff_s
from blockrelay_gateway.admission.redis_memory import read_memory
from blockrelay_gateway.helpers.offload import by_size
from blockrelay_gateway.policy import (
    KV_FIELDS_A_COMMAND,
    PAYLOAD_FULL_SHARE,
    PAYLOAD_POLL_S,
    RESULT_PART_BYTES,
    RESULT_RETRY_S,
    RESULTS_READ_AT_ONCE,
    RESULTS_SHARE,
    RESULTS_SHARE_OF_CONTROL,
    TENANT_RESULTS_SHARE,
    UNLIMITED_REDIS_SHARE,
)
from blockrelay_gateway.streaming.cell_links import CellLinks


class TensorResults:
    """The payload Redis as a gateway uses it. `full` says why nothing new may be accepted; it is empty otherwise."""

    def __init__(self, links: CellLinks, *, of_its_own: bool) -> None:
        """`of_its_own`: the payload Redis is not the control Redis."""
        self._client, self._payload, self._keys, self._watch = links.client, links.payload, links.keys, links.watch
        self._of_its_own = of_its_own
        self._reading = asyncio.Semaphore(RESULTS_READ_AT_ONCE)
        self._limit_bytes: int | None = None  # the most bytes of all results; None before the first `look`
        self.full = ""

    @property
    def doubt(self) -> str:
        """A possible cause, for error messages, if workers have stored a result and it is not there; may be empty."""
        known = "this gateway knows none but the control Redis: workers may have been given another one"
        return "" if self._of_its_own else f" ({known})"

    async def watch(self) -> None:
        """Reads the payload Redis' memory every PAYLOAD_POLL_S seconds until cancelled."""
        while True:
            try:
                await self.look()
                self._watch.worked("watch the payload Redis")
            except RedisTrouble as error:
                self._watch.failed("watch the payload Redis", error)
            await asyncio.sleep(PAYLOAD_POLL_S)

    async def look(self) -> None:
        """Reads the payload Redis' memory once. Raises RedisTrouble."""
        used, memory_limit, machine = await read_memory(self._payload)
        share = RESULTS_SHARE if self._of_its_own else RESULTS_SHARE_OF_CONTROL
        self._limit_bytes = int(share * (memory_limit or UNLIMITED_REDIS_SHARE * machine))
        full = self._of_its_own and memory_limit and used > PAYLOAD_FULL_SHARE * memory_limit
        self.full = f"the payload Redis uses {used >> 20} of {memory_limit >> 20} MiB" if full else ""

    async def limits(self, tenant: Tenant) -> tuple[int, int]:
        """The most bytes of all results, and of this tenant's; 0: no limit. Raises RedisTrouble."""
        if self._limit_bytes is None:
            await self.look()
        limit_bytes = self._limit_bytes or 0
        return limit_bytes, int(TENANT_RESULTS_SHARE * limit_bytes) if tenant.name else 0

    async def fetch(
        self, request_id: str, into: NDArray[np.float16], *, now_ms: Callable[[], int], give_up: Callable[[], bool]
    ) -> bool:
        """Reads the logits of an ended request into `into`, contiguous [positions, vocab]; False if they are gone.

        If more positions are stored than `into` has, it gets the last ones. Afterwards they expire in READ_RESULT_S
        seconds. After False or an error, `into` may be written in part. `now_ms` is Redis' clock. The read is repeated
        while the payload Redis fails: it raises RedisTrouble after RESULT_RETRY_S seconds, or if `give_up` returns
        True. Raises WireError for a result that cannot be decoded, or that has another shape.
        """
        name, reader = self._keys.result(request_id), ResultReader(into)

        async def part(start: int, count: int) -> bytes:
            ask = partial(cast(Any, self._payload.getrange), name, start, start + count - 1)
            return await self._read(ask, give_up)

        async with self._reading:
            header = await part(0, HEADER_BYTES)
            if not header:
                return False
            size = reader.begin(header)
            for start in range(0, size, RESULT_PART_BYTES):
                count = min(RESULT_PART_BYTES, size - start)
                piece = await part(HEADER_BYTES + start, count)
                if len(piece) < count:  # the result has expired meanwhile
                    return False
                await by_size(count, reader.push, piece)
            reader.end()
        await self._read(lambda: cast(Any, self._payload.expire(name, READ_RESULT_S)), give_up)
        try:
            gone = {request_id: now_ms() + 1000 * READ_RESULT_S}
            await cast(Any, self._client.zadd(self._keys.results, gone, xx=True, lt=True))
        except RedisTrouble as error:  # the accounting then frees the bytes as late as those of an unread result
            self._watch.count_error(error)
        return True

    async def fetch_kv(
        self, request_id: str, fields: Sequence[str], *, give_up: Callable[[], bool]
    ) -> list[bytes] | None:
        """Reads the KV pages that a request asked for, in the order of `fields`; None if one is gone.

        `fields` are `<page>.<layer>`, both from 0. Afterwards the pages expire in READ_RESULT_S seconds. The read is
        repeated while the payload Redis fails: it raises RedisTrouble after RESULT_RETRY_S seconds, or if `give_up`
        returns True.
        """
        name, result = self._keys.kv_asked(request_id), list[bytes]()
        for start in range(0, len(fields), KV_FIELDS_A_COMMAND):
            some = list(fields[start : start + KV_FIELDS_A_COMMAND])
            pages = await self._read(partial(cast(Any, self._payload.hmget), name, some), give_up)
            if None in pages:
                return None
            result += pages
        if fields:
            await self._read(lambda: cast(Any, self._payload.expire(name, READ_RESULT_S)), give_up)
        return result

    async def give(self, request_id: str, pages: Mapping[str, bytes]) -> None:
        """Writes KV pages that came with a request, by their fields `<page>.<layer>`, for its workers.

        Pages that are there already stay: the body may be another one under a known request id. If Redis fails, the
        workers compute the KV; nothing is raised.
        """
        name, fields = self._keys.kv_given(request_id), list(pages)
        try:
            if await cast(Any, self._payload.exists(name)):
                return
            for start in range(0, len(fields), KV_FIELDS_A_COMMAND):
                some = {one: pages[one] for one in fields[start : start + KV_FIELDS_A_COMMAND]}
                together = self._payload.pipeline(transaction=True)  # or a gateway that dies here leaves them for ever
                together.hset(name, mapping=cast(Any, some))
                together.expire(name, GIVEN_S)
                await cast(Any, together.execute())
        except RedisTrouble as error:
            self._watch.count_error(error)

    async def take_back(self, request_id: str) -> None:
        """Deletes the KV pages that came with a request. If Redis fails, nothing is raised: they expire."""
        try:
            await cast(Any, self._payload.unlink(self._keys.kv_given(request_id)))
        except RedisTrouble as error:  # they expire by themselves
            self._watch.count_error(error)

    async def _read(self, ask: Callable[[], Awaitable[Any]], give_up: Callable[[], bool]) -> Any:
        """Repeats `ask` while Redis fails. Raises RedisTrouble after RESULT_RETRY_S seconds, or if `give_up()`."""
        until, attempt = time.monotonic() + RESULT_RETRY_S, 0
        while True:
            try:
                return await ask()
            except RedisTrouble as error:
                self._watch.count_error(error)
                if time.monotonic() > until or give_up():
                    raise
                await asyncio.sleep(backoff_s(attempt))
                attempt += 1

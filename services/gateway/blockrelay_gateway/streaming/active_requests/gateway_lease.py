"""Registers in Redis that this gateway reads a request, so that no other gateway cancels it."""

from collections import Counter
from collections.abc import AsyncIterator, Container
from contextlib import asynccontextmanager
from typing import Any, cast

from blockrelay.protocol.constants import RETENTION_S
from blockrelay.protocol.transitions import calls
from blockrelay_gateway.streaming.cell_links import CellLinks


class GatewayLease:
    """Keeps the hash `followers:<id>` in Redis: the gateways that read a request's log, once more than one has read it.

    A gateway ends a request that its clients abandoned by the script FINISH, which does nothing while a gateway in the
    hash lives. `left` and `refused` note what Redis may have and should not: registrations of this gateway without a
    reader here, and requests whose clients were refused. `settle` takes both back.
    """

    def __init__(self, links: CellLinks) -> None:
        self._client, self._keys, self._scripts, self._gateway = links.client, links.keys, links.scripts, links.gateway
        self.retention_s = RETENTION_S  # until the cell's is read
        self._joining: Counter[str] = Counter()
        self._left: set[str] = set()
        self._refused: set[str] = set()

    async def add(self, request_id: str, gateway: str) -> None:
        """Registers that `gateway` (an id, of this or another one) reads the request. Raises RedisTrouble."""
        both = self._client.pipeline(transaction=False)
        both.hset(self._keys.followers(request_id), gateway, "")
        both.expire(self._keys.followers(request_id), self.retention_s)
        await both.execute()

    async def remove(self, request_id: str) -> None:
        """Removes the registration of this gateway. Raises RedisTrouble."""
        await cast(Any, self._client.hdel(self._keys.followers(request_id), self._gateway))

    @asynccontextmanager
    async def joining(self, request_id: str) -> AsyncIterator[None]:
        """Registers this gateway before the `async with` body reads the request. Raises RedisTrouble.

        Then either FINISH sees the registration, or the body sees the end. If the registering or the body fails, the
        next `settle` takes the registration back, unless another client of this gateway reads the request.
        """
        self._joining[request_id] += 1
        try:
            await self.add(request_id, self._gateway)
            yield
        except BaseException:
            self.left(request_id)
            raise
        finally:
            self._joining[request_id] -= 1
            self._joining += Counter()  # without zeros

    def left(self, request_id: str) -> None:
        """Notes that Redis may have a registration of ours for a request without a reader here."""
        self._left.add(request_id)

    def refused(self, request_id: str) -> None:
        """Notes that Redis may have accepted a request whose client was refused."""
        self._refused.add(request_id)

    async def settle(self, active: Container[str]) -> None:
        """Removes the registrations noted by `left`, and ends as cancelled the requests noted by `refused`.

        It spares `active`, the ids of the requests that this gateway reads, and does not end a request that another
        gateway reads. Raises RedisTrouble; the next call tries again.
        """
        for request_id in sorted(self._left):
            if request_id in self._joining:
                continue
            if request_id in self._left and request_id not in active:
                await self.remove(request_id)
                if request_id in self._joining or request_id in active:  # a reader has come in the meantime
                    await self.add(request_id, self._gateway)
            self._left.discard(request_id)
        for request_id in sorted(self._refused):
            if request_id in self._refused and request_id not in active:
                meta = {"error": "it was not accepted"}
                await self._scripts.run(calls.finish(request_id, "cancelled", meta=meta, abandoned=True))
            self._refused.discard(request_id)

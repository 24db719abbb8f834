"""A bounded number of places, which waiting tenants get in turn."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Hands out `places` to tenants in turn; a tenant with a name has at most half of them, rounded up.

    The tenant of clients without API keys has the name "" and may have all. Used in the event loop's thread.
    """

    def __init__(self, places: int) -> None:
        self._free, self._places = places, places
        self._taken: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Waits for a place and holds it while the context is open; calls of one tenant get places in their order."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._hand_on()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn came at the same moment
                self._give_back(tenant)
            raise
        try:
            yield
        finally:
            self._give_back(tenant)

    def _give_back(self, tenant: str) -> None:
        self._free += 1
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]
        self._hand_on()

    def _hand_on(self) -> None:
        """Gives free places to waiting calls, one tenant after the other."""
        for tenant in list(self._waiting):
            if not self._free:
                return
            queue = self._waiting[tenant]
            while queue and queue[0].done():  # it was cancelled
                queue.popleft()
            if not queue:
                del self._waiting[tenant]
            elif self._taken[tenant] < self._limit_of(tenant):
                queue.popleft().set_result(None)
                self._free -= 1
                self._taken[tenant] += 1
                self._waiting.move_to_end(tenant)
                self._hand_on()
                return

    def _limit_of(self, tenant: str) -> int:
        return -(-self._places // 2) if tenant else self._places

"""How many bytes of bodies this process holds at once, and how long a body may take to arrive.

The other bounds on memory: h11 refuses heads over HEAD_BYTES, a socket that is not read stops what goes into it, a log
is kept once for all its readers, and ACCEPT bounds how many there are.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from blockrelay.errors import LimitExceeded, RequestTooSlow, ServiceUnavailable
from blockrelay_gateway.http.errors import retry_after_s

#: Bytes of a request line with its headers.
HEAD_BYTES = 64 << 10

T = TypeVar("T")


class BodyBudget:
    """Bytes of bodies in memory, of all requests together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.used = max_bytes, 0


class BodyShare:
    """What one request has of the budget: from the arrival of its body until its answer begins."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget, self._bytes = budget, 0

    def take(self, count: int) -> None:
        """Raises LimitExceeded when it would be too much."""
        if self._budget.used + count > self._budget.max_bytes:
            said = "too many large requests arrive at once; try again later"
            raise LimitExceeded(said, scope="cell", limit="bodies", retry_after_s=retry_after_s(0))
        self._budget.used += count
        self._bytes += count

    def give_back(self) -> None:
        """Idempotent."""
        self._budget.used -= self._bytes
        self._bytes = 0


class BodyTimeout:
    """How long the bodies that are arriving are waited for."""

    def __init__(self, within_s: float) -> None:
        self._within_s, self._closing = within_s, False
        self._limits: set[asyncio.Timeout] = set()

    async def wait(self, body: Awaitable[T]) -> T:
        """Raises RequestTooSlow when it is not there in time, ServiceUnavailable when the gateway ends before."""
        try:
            async with asyncio.timeout(self._within_s) as limit:
                self._limits.add(limit)
                try:
                    return await body
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if self._closing:
                raise ServiceUnavailable("this gateway shuts down; nothing was queued, send it again") from None
            raise RequestTooSlow(f"the body did not arrive within {self._within_s:g} seconds; send it again") from None

    def close(self) -> None:
        """No body is waited for any more."""
        self._closing = True
        for limit in self._limits:
            limit.reschedule(0.0)

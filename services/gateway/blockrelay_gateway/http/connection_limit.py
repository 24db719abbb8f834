"""How much of this process its clients may have at once: requests under way, bytes of bodies and the time they take.

The other bounds on memory: h11 refuses heads over HEAD_BYTES, a socket that is not read stops what goes into it, a log
is kept once for all its readers, and ACCEPT bounds how many there are.
"""

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

from blockrelay.errors import Overloaded, RequestTooSlow, ServiceUnavailable
from blockrelay_gateway.http.authentication import OPEN_PATHS
from blockrelay_gateway.http.errors import Refusals
from blockrelay_gateway.http.retry_after import retry_after_s

#: Bytes of a request line with its headers.
HEAD_BYTES = 64 << 10

T = TypeVar("T")


class BodyBudget:
    """Bytes of bodies in memory, of all requests together."""

    def __init__(self, most: int) -> None:
        self.most, self.used = most, 0


class BodyShare:
    """What one request has of the budget: from the arrival of its body until its answer begins."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget, self._bytes = budget, 0

    def take(self, count: int) -> None:
        """Raises Overloaded when it would be too much."""
        if self._budget.used + count > self._budget.most:
            said = "too many large requests arrive at once; try again later"
            raise Overloaded(said, limit="bodies", retry_after_s=retry_after_s(0))
        self._budget.used += count
        self._bytes += count

    def give_back(self) -> None:
        """Idempotent."""
        self._budget.used -= self._bytes
        self._bytes = 0


class Arrivals:
    """Bodies that are on their way."""

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
            raise RequestTooSlow(f"the body was not there after {self._within_s:g} seconds; send it again") from None

    def close(self) -> None:
        """Nobody is waited for any more."""
        self._closing = True
        for limit in self._limits:
            limit.reschedule(0.0)


class Crowd:
    """Plain ASGI: 503 for what comes while `most` requests and sockets are under way; health and metrics pass."""

    def __init__(self, app: ASGIApp, most: int, refusals: Refusals) -> None:
        self._app, self._most, self._refusals = app, most, refusals
        self._now = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        if self._now >= self._most:
            said = f"{self._now} requests are under way at this gateway, its limit; try again later"
            error = Overloaded(said, limit="connections", retry_after_s=retry_after_s(0))
            if scope["type"] == "http":
                await self._refusals.answer(scope, error)(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1013, "reason": str(error)})
            return
        with self._inside():
            await self._app(scope, receive, send)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._now += 1
        try:
            yield
        finally:
            self._now -= 1

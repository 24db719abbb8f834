"""Limits the memory of bodies and answers in this process, and the time in which a body has to arrive.

One budget counts bodies that arrive and wait, their parsed JSON (`helpers.json_size`), and tensor answers until they
are sent. Other memory has other bounds: h11 refuses heads over HEAD_BYTES (`http.server`), a socket that the client
does not read stops its writer, a token log is kept once for all its readers, and ACCEPT bounds the number of requests.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable
from typing import TypeVar

from blockrelay.errors import LimitExceeded, RequestTooLarge, RequestTooSlow, ServiceUnavailable
from blockrelay_gateway.http.errors import retry_after_s
from blockrelay_gateway.policy import LARGE_SHARE, SMALL_BODY_BYTES, WAITING_SHARE

T = TypeVar("T")


class BodyBudget:
    """The bytes that all requests and answers together may take. The largest body always fits if it is alone.

    It belongs to the event loop's thread.
    """

    def __init__(self, max_bytes: int, *, largest_body: int = 0) -> None:
        """`max_bytes` is the budget, raised to `largest_body`, the most bytes of one body."""
        self.max_bytes, self.used = max(max_bytes, largest_body), 0
        #: The most bytes of large bodies that may wait together.
        self.max_waiting = max(int(WAITING_SHARE * self.max_bytes), largest_body)
        #: The most `used` bytes with which large bodies, parsed JSON and answers still get room.
        self.max_large = max(int(LARGE_SHARE * self.max_bytes), largest_body)
        #: The most bytes of bodies, arriving and waiting, of one named tenant.
        self.max_tenant = max(self.max_waiting // 2, largest_body)
        #: Bytes taken for bodies, by the tenant's name ("" if it is not known).
        self.tenants: Counter[str] = Counter()
        self.waiting = 0
        """Bytes of large bodies that have arrived."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._watching: list[asyncio.Future[None]] = []

    def room(self, count: int, limit: int) -> bool:
        """True if `used` with `count` bytes more is at most `limit`."""
        return self.used + count <= limit

    def given_back(self) -> Awaitable[None]:
        """Returns an awaitable that ends when bytes are given back."""
        turn = asyncio.get_running_loop().create_future()
        self._watching.append(turn)
        return turn

    def give_back(self, count: int) -> None:
        """Frees `count` bytes and wakes those who wait for room."""
        self.used -= count
        watching, self._watching = self._watching, []
        for turn in watching:
            if not turn.done():
                turn.set_result(None)
        while self._waiting and (self._waiting[0][1].done() or self.room(self._waiting[0][0], self.max_large)):
            count, turn = self._waiting.popleft()
            if not turn.done():
                self.used += count
                turn.set_result(None)

    async def wait(self, count: int, within_s: float) -> None:
        """Takes `count` bytes as soon as they fit, first come, first served.

        Raises LimitExceeded if they do not fit within `within_s` seconds. The caller first makes sure that `count` is
        at most `max_large`: bytes that can never fit would keep later ones waiting.
        """
        if not self._waiting and self.room(count, self.max_large):
            self.used += count
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        try:
            async with asyncio.timeout(within_s):
                await turn
        except BaseException as error:
            taken = turn.done() and not turn.cancelled()  # its turn came at the same moment
            turn.cancel()
            self.give_back(count if taken else 0)
            if isinstance(error, TimeoutError):
                raise _no_room() from None
            raise


class BodyShare:
    """The bytes that one request has of the budget, from the arrival of its body until nothing of it is kept."""

    def __init__(self, budget: BodyBudget, *, large: bool = False, tenant: str = "") -> None:
        """`large`: the body will be large. `tenant`: the tenant's name if it is known, else ""."""
        self._budget, self._bytes, self._large = budget, 0, large
        self._tenant, self._arrived = tenant, 0
        self._waiting = 0  # its bytes that count as a large body's

    def take(self, count: int) -> None:
        """Takes `count` bytes more for the body, or nothing.

        Raises LimitExceeded if the budget (scope "cell") or the tenant (scope "client") has no room.
        """
        if self._tenant and count and self._budget.tenants[self._tenant] + count > self._budget.max_tenant:
            message = "this key has too many large requests on their way; try again later"
            raise LimitExceeded(message, scope="client", limit="bodies", retry_after_s=retry_after_s(0))
        self._large = self._large or self._bytes + count > SMALL_BODY_BYTES
        budget = self._budget
        if count and not budget.room(count, budget.max_large if self._large else budget.max_bytes):
            raise _no_room()
        if count and self._large and budget.waiting + self._arrived - self._waiting + count > budget.max_waiting:
            raise _no_room()
        self.add(count)

    def add(self, count: int) -> None:
        """Adds bytes of the body that are in memory already, also without room."""
        self._budget.used += count
        self._budget.tenants[self._tenant] += count
        self._bytes += count
        self._arrived += count
        if self._large:
            self._budget.waiting += self._arrived - self._waiting
            self._waiting = self._arrived

    def check(self, count: int) -> None:
        """Raises RequestTooLarge if `count` bytes more can never fit."""
        self._check(count, self._budget.max_large)

    def check_parsed(self, count: int) -> None:
        """Raises RequestTooLarge if `count` bytes of parsed JSON can never fit; a key's body leaves room for others."""
        self._check(count, self._budget.max_large // 2 if self._tenant else self._budget.max_large)

    def _check(self, count: int, limit: int) -> None:
        if self._bytes + count > limit:
            cause = (
                f"the request takes {count >> 20} MiB of memory here, and at most {limit >> 20} MiB are there for it"
            )
            raise RequestTooLarge(f"{cause}: send less at a time, and tensors as data_b64")

    def take_parsed(self, count: int) -> Awaitable[None] | None:
        """Takes `count` bytes for parsed JSON and returns None; without room, an awaitable for the next try.

        The awaitable ends when bytes are given back, which may still be too few. The caller calls `check_parsed` first:
        bytes that can never fit would be tried for ever. The caller must not hold a helper process while it waits:
        requests behind it may have to finish first to make room.
        """
        if not self._budget.room(count, self._budget.max_large):
            return self._budget.given_back()
        self._budget.used += count
        self._bytes += count
        return None

    async def wait(self, count: int, within_s: float) -> None:
        """Takes `count` bytes for an answer as soon as there is room.

        Raises LimitExceeded without room within `within_s` seconds, RequestTooLarge if they can never fit.
        """
        self.check(count)
        await self._budget.wait(count, within_s)
        self._bytes += count

    def give_back(self) -> None:
        """Gives all bytes back. Idempotent."""
        count, self._bytes = self._bytes, 0
        self._budget.tenants[self._tenant] -= self._arrived
        self._budget.waiting -= self._waiting
        self._arrived = self._waiting = 0
        if not self._budget.tenants[self._tenant]:
            del self._budget.tenants[self._tenant]
        self._budget.give_back(count)


def _no_room() -> LimitExceeded:
    message = "too many large requests are here at once; try again later"
    return LimitExceeded(message, scope="cell", limit="bodies", retry_after_s=retry_after_s(0))


class ReceivedBody:
    """A whole body, whose bytes are kept until `take`, and its share of the budget."""

    def __init__(self, content: bytes, share: BodyShare) -> None:
        self.size, self.share = len(content), share
        self._content, self.taken = content, False

    def take(self) -> bytes:
        """Returns the bytes the first time, then b""; the share is kept."""
        self.taken = True
        content, self._content = self._content, b""
        return content


class BodyTimeout:
    """The time limit for bodies that are arriving."""

    def __init__(self, within_s: float) -> None:
        self._within_s, self._closing = within_s, False
        self._limits: set[asyncio.Timeout] = set()

    async def wait(self, body: Awaitable[T]) -> T:
        """Waits for a body. Raises RequestTooSlow if it is late, ServiceUnavailable if the gateway ends before."""
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
        """Ends the waits that are under way immediately, because the gateway ends.

        A later wait has its full time, and then raises ServiceUnavailable instead of RequestTooSlow.
        """
        self._closing = True
        for limit in self._limits:
            limit.reschedule(0.0)

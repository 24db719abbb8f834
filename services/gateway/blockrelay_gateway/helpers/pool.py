"""Runs functions in helper processes, which are started when they are needed and end with the gateway.

The pool is anyio's: each helper is a fresh interpreter on two pipes, reads its next call when it has answered the last
one, and ends when the gateway's end of a pipe is closed, also by kill -9. One that dies takes only its own call along.
Signals that a terminal or a service manager sends to all processes end the gateway, which may still need its helpers.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple

from anyio import BrokenWorkerProcess, CapacityLimiter, to_process

from blockrelay.errors import RequestTooLarge, ServiceUnavailable
from blockrelay.observability import logs
from blockrelay_gateway.helpers.turns import Turns

T = TypeVar("T")
Args = TypeVarTuple("Args")
#: A call whose helper dies is made once more: another reason than the call may have ended it.
TRIES = 2
#: How long a call may take, with the time in which it waits for memory and a helper, and this one starts. Seconds.
WITHIN_S = 60.0


class Helpers:
    """At most `count` processes, which tenants use in turn."""

    def __init__(self, count: int, *, within_s: float = WITHIN_S) -> None:
        self._within_s, self._turns = within_s, Turns(count)
        self._limiter = CapacityLimiter(count)

    async def run(
        self,
        tenant: str,
        work: Callable[[*Args], T],
        *args: *Args,
        room: Callable[[], Awaitable[None] | None] | None = None,
    ) -> T:
        """`work(*args)` in a helper: a function of a module, with arguments that can be pickled.

        `room` takes memory when its turn has come, or answers what to wait for: others have their turns meanwhile, as
        they may have the memory.

        Raises what it raises, RequestTooLarge where memory does not suffice, and ServiceUnavailable when it takes too
        long (its helper is then killed) or its helpers die.
        """
        try:
            async with asyncio.timeout(self._within_s):
                while True:
                    async with self._turns.place(tenant):
                        lacking = None if room is None else room()
                        if lacking is None:
                            return await self._try(work, *args)
                    await lacking
        except TimeoutError:
            logs.get().warning("HELPER_TOO_SLOW", within_s=self._within_s)
            said = f"this gateway did not get to read the body within {self._within_s:g} seconds; try again later"
            raise ServiceUnavailable(said) from None
        except MemoryError:
            raise RequestTooLarge("there is not enough memory to read the body") from None

    async def _try(self, work: Callable[[*Args], T], *args: *Args) -> T:
        for attempt in range(TRIES):
            try:
                return await to_process.run_sync(_in_helper, work, *args, cancellable=True, limiter=self._limiter)
            except BrokenWorkerProcess:
                logs.get().warning("HELPER_DIED", attempt=attempt + 1)
        raise ServiceUnavailable("the process that was reading the body died twice; nothing was queued, try again")


def _in_helper(work: Callable[[*Args], T], *args: *Args) -> T:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return work(*args)

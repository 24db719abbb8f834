"""Runs functions in helper processes, which are started when they are needed and end with the gateway.

The pool is anyio's: each helper is a new interpreter on two pipes, reads its next call when it has answered the last
one, and ends when the gateway's end of a pipe is closed, also by kill -9. A helper that dies loses only its own call.
Helpers ignore the signals that a terminal or a service manager sends to all processes: the gateway, which ends on them,
may still need its helpers.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple

from anyio import BrokenWorkerProcess, CapacityLimiter, to_process

from blockrelay.errors import RequestTooLarge, ServiceUnavailable
from blockrelay.observability import logs
from blockrelay_gateway.helpers.turns import Turns
from blockrelay_gateway.policy import HELPER_CALL_S, HELPER_TRIES

T = TypeVar("T")
Args = TypeVarTuple("Args")


class Helpers:
    """Up to `count` helper processes, which tenants use in turn."""

    def __init__(self, count: int, *, within_s: float = HELPER_CALL_S) -> None:
        self._within_s, self._turns = within_s, Turns(count)
        self._limiter = CapacityLimiter(count)

    async def run(
        self,
        tenant: str,
        work: Callable[[*Args], T],
        *args: *Args,
        room: Callable[[], Awaitable[None] | None] | None = None,
    ) -> T:
        """Returns `work(*args)`, run in a helper.

        `work` is a function of a module; its arguments, its result and its errors can be pickled.

        `room` is called when the call's turn has come. It takes memory and returns None, or returns an awaitable after
        which it is tried again; others have their turns meanwhile, because they may hold the memory.

        Raises what `work` and `room` raise, and RequestTooLarge if memory runs out. Raises ServiceUnavailable if the
        call, with its wait for a turn and for `room`, takes longer than `within_s` seconds; its helper is then killed.
        A call whose helper dies is run again, up to HELPER_TRIES times in all, and then raises ServiceUnavailable.
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
            message = f"this gateway did not get to read the body within {self._within_s:g} seconds; try again later"
            raise ServiceUnavailable(message) from None
        except MemoryError:
            raise RequestTooLarge("there is not enough memory to read the body") from None

    async def _try(self, work: Callable[[*Args], T], *args: *Args) -> T:
        for attempt in range(HELPER_TRIES):
            try:
                return await to_process.run_sync(_in_helper, work, *args, cancellable=True, limiter=self._limiter)
            except BrokenWorkerProcess:
                logs.get().warning("HELPER_DIED", attempt=attempt + 1)
        raise ServiceUnavailable("the process that was reading the body died twice; nothing was queued, try again")


def _in_helper(work: Callable[[*Args], T], *args: *Args) -> T:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return work(*args)

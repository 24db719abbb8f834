"""A request without a reader: it is cancelled after the grace period, unless somebody comes back or reads elsewhere."""

import asyncio
import time

from blockrelay.errors import RedisTrouble
from blockrelay.observability import logs
from blockrelay.protocol.transitions import calls
from blockrelay.redis.client import AsyncScripts, backoff_s
from blockrelay.redis.errors import RedisWatch
from blockrelay_gateway.streaming.following.followed_request import FollowedRequest
from blockrelay_gateway.streaming.following.followers import Followers

#: Seconds between two attempts to cancel a request that another gateway reads, at least.
AGAIN_S = 1.0
#: From the moment that a client asks for a request until it is one of its readers, at most.
SOUGHT_S = 5.0


class Abandonment:
    """The grace periods of a gateway, and what follows each."""

    def __init__(
        self, followers: Followers, scripts: AsyncScripts, watch: RedisWatch, *, gateway: str, grace_s: float
    ) -> None:
        self._followers, self._scripts, self._watch = followers, scripts, watch
        self._gateway, self._grace_s = gateway, grace_s
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, followed: FollowedRequest) -> None:
        """Its last reader has left: its grace period begins."""
        followed.grace = asyncio.get_running_loop().call_later(self._grace_s, self._give_up, followed)

    def stop(self, followed: FollowedRequest) -> None:
        """It has a reader again, or has ended. Idempotent."""
        if followed.grace is not None:
            followed.grace.cancel()
            followed.grace = None

    def close(self) -> None:
        """Nothing is cancelled any more: the requests go on."""
        for task in self._tasks:
            task.cancel()

    def _give_up(self, followed: FollowedRequest) -> None:
        followed.grace = None
        task = asyncio.get_running_loop().create_task(self._cancel(followed), name=f"grace-{followed.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _cancel(self, followed: FollowedRequest) -> None:
        """The grace period is over: cancel, unless a reader came back here or reads at another gateway that lives."""
        attempt = 0
        while followed.end is None and followed.readers == 0:
            try:
                if await self._cancelled(followed):
                    return
                attempt = 0
                await asyncio.sleep(max(self._grace_s, AGAIN_S))
            except RedisTrouble as error:
                self._watch.met(error)
                await asyncio.sleep(backoff_s(attempt))
                attempt += 1

    async def _cancelled(self, followed: FollowedRequest) -> bool:
        """Whether the request has ended: FINISH, which looks for followers itself, said so. This gateway is not one of
        them any more."""
        await self._followers.remove(followed.id)
        if followed.readers or time.monotonic() - followed.sought < SOUGHT_S:
            await self._followers.add(followed.id, self._gateway)
            return False
        followed.leaving = True
        try:
            call = calls.finish(followed.id, "cancelled", meta={"error": "no reader"}, abandoned=True)
            answer = await self._scripts.run(call)
        except RedisTrouble:
            followed.leaving = False  # if it did run, its end is in the log
            raise
        followed.leaving = answer != "READ"
        if not followed.leaving:
            logs.get().info("READER_ELSEWHERE", request_id=followed.id)
        return followed.leaving

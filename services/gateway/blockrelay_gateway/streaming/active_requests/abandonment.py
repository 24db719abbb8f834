"""Cancels a request without a reader after a grace period, unless a reader comes back or reads at another gateway."""

import asyncio
import time

from blockrelay.errors import RedisTrouble
from blockrelay.observability import logs
from blockrelay.protocol.transitions import calls
from blockrelay.redis.client import backoff_s
from blockrelay_gateway.policy import CANCEL_AGAIN_S, SOUGHT_S
from blockrelay_gateway.streaming.active_requests.active_request import ActiveRequest
from blockrelay_gateway.streaming.active_requests.gateway_lease import GatewayLease
from blockrelay_gateway.streaming.cell_links import CellLinks


class Abandonment:
    """The grace periods of one gateway, and the cancellation at the end of each."""

    def __init__(self, links: CellLinks, lease: GatewayLease, *, grace_s: float) -> None:
        self._scripts, self._watch, self._gateway = links.scripts, links.watch, links.gateway
        self._lease, self._grace_s = lease, grace_s
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, active: ActiveRequest) -> None:
        """Begins the grace period of a request whose last reader has left."""
        active.grace = asyncio.get_running_loop().call_later(self._grace_s, self._give_up, active)

    def stop(self, active: ActiveRequest) -> None:
        """Ends the grace period: the request has a reader again, or has ended. Idempotent."""
        if active.grace is not None:
            active.grace.cancel()
            active.grace = None

    def close(self) -> None:
        """Stops the cancellations that are under way; the requests go on. Grace periods end only by `stop`."""
        for task in self._tasks:
            task.cancel()

    def _give_up(self, active: ActiveRequest) -> None:
        active.grace = None
        task = asyncio.get_running_loop().create_task(self._cancel(active), name=f"grace-{active.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _cancel(self, active: ActiveRequest) -> None:
        """The grace period is over: cancel, unless a reader came back here or reads at another gateway that lives."""
        attempt = 0
        while active.end is None and active.readers == 0:
            try:
                if await self._cancelled(active):
                    return
                attempt = 0
                await asyncio.sleep(max(self._grace_s, CANCEL_AGAIN_S))
            except RedisTrouble as error:
                self._watch.count_error(error)
                await asyncio.sleep(backoff_s(attempt))
                attempt += 1

    async def _cancelled(self, active: ActiveRequest) -> bool:
        """Calls FINISH, after this gateway has left the request's readers; True if the request has ended.

        FINISH looks for other gateways that read it. It is not called, and the answer is False, if a reader came back
        or a client asked for the request within the last SOUGHT_S seconds. Raises RedisTrouble.
        """
        await self._lease.remove(active.id)
        if active.readers or time.monotonic() - active.sought < SOUGHT_S:
            await self._lease.add(active.id, self._gateway)
            return False
        active.leaving = True
        try:
            call = calls.finish(active.id, "cancelled", meta={"error": "no reader"}, abandoned=True)
            answer = await self._scripts.run(call)
        except RedisTrouble:
            active.leaving = False  # if it did run, its end is in the log
            raise
        active.leaving = answer != "READ"
        if not active.leaving:
            logs.get().info("READER_ELSEWHERE", request_id=active.id)
        return active.leaving

"""Status events of all workers for clients: one subscription to each cell while a client listens.

A listener gets the events of all requests, but only its own tenant's with their request id, unless it may see all.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, cast

from blockrelay.auth.api_keys import Tenant
from blockrelay.errors import RedisTrouble, WireError
from blockrelay.observability import logs
from blockrelay.protocol.encoding.request_ids import public_id
from blockrelay.protocol.status_events import decode_events
from blockrelay.redis.client import backoff_s
from blockrelay.redis.subscription import subscribed_async
from blockrelay_gateway.policy import STATUS_EVENTS_KEPT, TENANTS_REMEMBERED
from blockrelay_gateway.streaming.cell_links import CellLinks

#: One event as JSON, in the form that clients get. `request_id` is None in events of other tenants' requests.
Event = dict[str, Any]


class Listener:
    """One client that listens to status events; a context manager. `events` ends with the gateway."""

    def __init__(self, sources: Sequence["StatusEventFeed"], tenant: Tenant) -> None:
        self.tenant = tenant
        self._sources, self._dropped = sources, 0
        self._queue: asyncio.Queue[Event | None] = asyncio.Queue()

    def __enter__(self) -> "Listener":
        for source in self._sources:
            source.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        for source in self._sources:
            source.remove(self)

    def put(self, event: Event | None) -> None:
        """Adds an event for the client, or drops it if STATUS_EVENTS_KEPT wait already; None ends the stream."""
        if event is not None and self._queue.qsize() >= STATUS_EVENTS_KEPT:
            self._dropped += 1
        else:
            self._queue.put_nowait(event)

    async def events(self, silence_s: float) -> AsyncIterator[Event | None]:
        """Yields events until the gateway ends, and None after every `silence_s` seconds without one.

        The context must be open: outside it no event arrives, not even the end.
        Events that found no room are missing; `{"type": "dropped", "count": n}` then says how many.
        """
        while True:
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                yield {"type": "dropped", "count": dropped}
            try:
                async with asyncio.timeout(silence_s):
                    event = await self._queue.get()
            except TimeoutError:
                yield None
                continue
            if event is None:
                return
            yield event


class StatusEventFeed:
    """Delivers the status events of one cell to its listeners. `run` is background work of the gateway."""

    def __init__(self, links: CellLinks) -> None:
        self._client, self._keys, self._watch = links.client, links.keys, links.watch
        self._listeners: set[Listener] = set()
        self._wanted = asyncio.Event()
        self._tenants: OrderedDict[str, str | None] = OrderedDict()
        self._closed = False

    def add(self, listener: Listener) -> None:
        """Delivers events to `listener` from now on."""
        self._listeners.add(listener)
        self._wanted.set()
        if self._closed:
            listener.put(None)

    def remove(self, listener: Listener) -> None:
        """Delivers no more events to `listener`."""
        self._listeners.discard(listener)

    def close(self) -> None:
        """Ends the streams of all listeners, and of those that come later."""
        self._closed = True
        for listener in self._listeners:
            listener.put(None)

    async def run(self) -> None:
        """Subscribes while there are listeners, until cancelled."""
        attempt = 0
        while True:
            await self._wanted.wait()
            try:
                await self._listen()
                attempt = 0
            except RedisTrouble as error:
                self._watch.failed("status events", error)
                await asyncio.sleep(backoff_s(attempt))
                attempt += 1

    async def _listen(self) -> None:
        """Delivers events until there is no listener any more. Raises RedisTrouble."""
        messages = subscribed_async(self._client, self._keys.status_channel)
        try:
            async for message in messages:
                self._watch.worked("status events")
                if not self._listeners:
                    self._wanted.clear()
                    return
                if message is not None:
                    await self._deliver(message)
        finally:
            await cast(Any, messages).aclose()

    async def _deliver(self, message: bytes) -> None:
        try:
            events = decode_events(message)
        except WireError as error:
            logs.get().error("STATUS_EVENTS_UNREADABLE", error=str(error))
            return
        if not all(sees_all(listener.tenant) for listener in self._listeners):
            await self._look_up({event["request_id"] for event in events})
        for listener in list(self._listeners):
            for event in events:
                own = sees_all(listener.tenant) or self._tenants.get(event["request_id"]) == listener.tenant.name
                name = public_id(event["request_id"], self._keys.cell) if own else None
                listener.put({**event, "request_id": name})

    async def _look_up(self, requests: Iterable[str]) -> None:
        """Reads and remembers the tenants of requests; None for a request that Redis does not know."""
        unknown = [request_id for request_id in requests if request_id not in self._tenants]
        if unknown:
            ask = self._client.pipeline(transaction=False)
            for request_id in unknown:
                ask.hmget(self._keys.request(request_id), "model", "tenant")
            for request_id, (model, tenant) in zip(unknown, await cast(Any, ask.execute()), strict=True):
                self._tenants[request_id] = None if model is None else (tenant or b"").decode()
        while len(self._tenants) > TENANTS_REMEMBERED:
            self._tenants.popitem(last=False)


def sees_all(tenant: Tenant) -> bool:
    """True for an operator's key, and for every client if API keys are off."""
    return tenant.operator or not tenant.name

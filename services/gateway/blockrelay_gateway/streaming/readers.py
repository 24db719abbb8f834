"""A client's reader of followed requests: it waits for their log entries and yields them in batches."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

from blockrelay.protocol.messages import LogEntry
from blockrelay_gateway.draining.drain import GatewayEnds
from blockrelay_gateway.streaming.active_requests.active_request import ActiveRequest
from blockrelay_gateway.streaming.active_requests.request_registry import RequestRegistry


class Readers:
    """Reads several requests together; a context manager that counts as one reader of each.

    There is at least one request. The reader is attached from construction on, so that a client that leaves before the
    first read is noticed as well.
    """

    def __init__(self, registry: RequestRegistry, requests: Sequence[ActiveRequest], *, replayed: bool = False) -> None:
        """`replayed`: an Idempotency-Key or a repeated session step led to requests that were accepted before."""
        self._registry, self.requests, self.replayed = registry, tuple(requests), replayed
        #: More headers of the answer.
        self.notes: dict[str, str] = {}
        self._event: asyncio.Event | None = asyncio.Event()
        for active in self.requests:
            registry.attach(active)
            active.events.add(self._event)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer: the request id, and `idempotent-replayed` (as Stripe's) for a repeated request."""
        replayed = {"idempotent-replayed": "true"} if self.replayed else {}
        return {"x-request-id": self.requests[0].public_id(), **replayed, **self.notes}

    def __enter__(self) -> "Readers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Detaches the reader from its requests. Idempotent."""
        if self._event is not None:
            for active in self.requests:
                active.events.discard(self._event)
                self._registry.detach(active)
            self._event = None

    async def batches(self, *, quiet_s: float | None = None) -> AsyncIterator[list[tuple[int, LogEntry]]]:
        """Yields the new entries, each with the index of its request, until all requests have ended.

        Each call starts at position 1. It yields [] after `quiet_s` seconds of silence (None: never). It may not be
        called after `close`, nor twice at once. Raises GatewayEnds when the gateway shuts down before all have ended.
        """
        event, loop = self._event, asyncio.get_running_loop()
        assert event is not None, "closed"
        read = [0] * len(self.requests)
        # One alarm that is set again when it rings: a timer for every wait would be a tenth of a token's work.
        last_entry_at = loop.time()
        alarm = None if quiet_s is None else loop.call_at(last_entry_at + quiet_s, event.set)
        try:
            while True:
                event.clear()
                batch: list[tuple[int, LogEntry]] = []
                for index, active in enumerate(self.requests):
                    if len(active.entries) > read[index]:
                        batch += [(index, entry) for entry in active.entries[read[index] :]]
                        read[index] = len(active.entries)
                if batch:
                    last_entry_at = loop.time()
                    yield batch
                    continue
                if all(active.end is not None for active in self.requests):
                    return
                if self._registry.closing:
                    where = f"/v1/requests/{self.requests[0].public_id()}"
                    raise GatewayEnds(f"this gateway shuts down; the request goes on, read it at {where}")
                if alarm is not None and quiet_s is not None and loop.time() >= alarm.when():
                    quiet = loop.time() >= last_entry_at + quiet_s
                    last_entry_at = loop.time() if quiet else last_entry_at
                    alarm = loop.call_at(last_entry_at + quiet_s, event.set)
                    if quiet:
                        yield []
                        continue
                await event.wait()
        finally:
            if alarm is not None:
                alarm.cancel()

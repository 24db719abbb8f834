"""Reading flights: where log entries wait for the clients that want them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

from blockrelay.errors import ServiceUnavailable
from blockrelay.protocol.messages import LogEntry
from blockrelay_gateway.streaming.followed_requests import Flight, Flights


class Readers:
    """Reads several flights together; a context manager that holds one place as a reader in each.

    Attached from construction on, so that a client that leaves before the first read is noticed as well.
    """

    def __init__(self, flights: Flights, followed: Sequence[Flight], *, replayed: bool = False) -> None:
        """`replayed`: an Idempotency-Key led to requests that were accepted before."""
        self._owner, self.flights, self.replayed = flights, tuple(followed), replayed
        self._event: asyncio.Event | None = asyncio.Event()
        for flight in self.flights:
            flights.attach(flight)
            flight.events.add(self._event)

    @property
    def headers(self) -> dict[str, str]:
        """What an answer that was not asked for the first time says, as Stripe's do."""
        return {"idempotent-replayed": "true"} if self.replayed else {}

    def __enter__(self) -> "Readers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._event is not None:
            for flight in self.flights:
                flight.events.discard(self._event)
                self._owner.detach(flight)
            self._event = None

    async def batches(self, *, quiet_s: float | None = None) -> AsyncIterator[list[tuple[int, LogEntry]]]:
        """(index of the flight, entry) of everything new, until all have ended; [] after `quiet_s` seconds of silence.

        Raises ServiceUnavailable when the gateway shuts down.
        """
        event, loop = self._event, asyncio.get_running_loop()
        assert event is not None, "closed"
        read = [0] * len(self.flights)
        # One alarm that is set again when it rings: a timer for every wait would be a tenth of a token's work.
        heard = loop.time()
        alarm = None if quiet_s is None else loop.call_at(heard + quiet_s, event.set)
        try:
            while True:
                event.clear()
                batch: list[tuple[int, LogEntry]] = []
                for index, flight in enumerate(self.flights):
                    if len(flight.entries) > read[index]:
                        batch += [(index, entry) for entry in flight.entries[read[index] :]]
                        read[index] = len(flight.entries)
                if batch:
                    heard = loop.time()
                    yield batch
                    continue
                if all(flight.end is not None for flight in self.flights):
                    return
                if self._owner.closing:
                    raise ServiceUnavailable(
                        "this gateway shuts down; the request goes on, "
                        f"read it at /v1/requests/{self.flights[0].request}"
                    )
                if alarm is not None and quiet_s is not None and loop.time() >= alarm.when():
                    quiet = loop.time() >= heard + quiet_s
                    heard = loop.time() if quiet else heard
                    alarm = loop.call_at(heard + quiet_s, event.set)
                    if quiet:
                        yield []
                        continue
                await event.wait()
        finally:
            if alarm is not None:
                alarm.cancel()

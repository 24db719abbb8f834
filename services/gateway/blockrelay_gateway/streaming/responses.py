"""From flights to what a client reads: whole answers and event streams, the same for every format."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from blockrelay.errors import BlockrelayError
from blockrelay.failpoints import reach
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.http.errors import error_body
from blockrelay_gateway.streaming import sse
from blockrelay_gateway.streaming.deltas import Answer, Delta, Relay, failure
from blockrelay_gateway.streaming.event_ids import event_id
from blockrelay_gateway.streaming.followed_requests import Flight, Flights
from blockrelay_gateway.streaming.readers import Readers


class StreamFormat(Protocol):
    """How one kind of answer looks in a stream. `index` is that of the prompt."""

    def opening(self, flight: Flight) -> dict[str, Any] | None:
        """A chunk before the first token, or None."""
        ...

    def chunk(self, index: int, delta: Delta, flight: Flight, fingerprint: str) -> dict[str, Any]:
        """The chunk of one delta."""
        ...

    def problem(self, error: BlockrelayError, flight: Flight) -> dict[str, Any]:
        """The chunk of a bad end."""
        ...

    def closing(self, flights: Sequence[Flight]) -> dict[str, Any] | None:
        """A chunk after the last delta of requests that all ended well, or None."""
        ...


class Source(Protocol):
    """Where answers come from: a gateway."""

    @property
    def settings(self) -> GatewaySettings: ...

    @property
    def flights(self) -> Flights: ...

    def relay(self, flight: Flight) -> Relay:
        """A fresh one for one reader."""
        ...


async def collect(gateway: Source, readers: Readers) -> list[Answer]:
    """Wait for the end of every request. Raises ServiceUnavailable when the gateway shuts down first."""
    relays = [gateway.relay(flight) for flight in readers.flights]
    answers = [Answer() for _ in readers.flights]
    async for batch in readers.batches():
        for index, entry in batch:
            answers[index].add(relays[index].push(entry))
    return answers


async def stream(
    gateway: Source, readers: Readers, form: StreamFormat, *, after: Sequence[int] | None = None
) -> AsyncIterator[bytes]:
    """The events of an answer, or those behind the positions `after` (`event_ids`), one for each flight.

    A bad end is an event of its own, never a silent close.
    """
    flights = readers.flights
    relays = [gateway.relay(flight) for flight in flights]
    request, seen = flights[0].request, list(after or (0,) * len(flights))
    yield sse.RETRY
    if after is None and (opening := form.opening(flights[0])):
        yield sse.event(opening, event_id(request, seen))
    try:
        async for batch in readers.batches(quiet_s=gateway.settings.keep_alive_s):
            if not batch:
                yield sse.KEEP_ALIVE
                continue
            parts: list[bytes] = []
            for index, entry in batch:
                delta = relays[index].push(entry)
                # A format may keep what it has shown, so it sees every delta; the client has those up to `seen`.
                error = failure(delta.end) if delta.end is not None else None
                if error is not None:
                    body = form.problem(error, flights[index])
                else:
                    fingerprint = flights[index].numerics or await gateway.flights.numerics(flights[index])
                    body = form.chunk(index, delta, flights[index], fingerprint)
                # A bad end is told even where the client has seen more: Redis may have lost that before the end.
                if delta.position > seen[index] or error is not None:
                    seen[index] = max(seen[index], delta.position)
                    parts.append(sse.event(body, event_id(request, seen)))
            reach("gateway.before_event")
            yield b"".join(parts)
            reach("gateway.after_event")
        good = all(flight.end is not None and failure(flight.end) is None for flight in flights)
        last = [flight.tokens + 2 for flight in flights]
        if good and seen != last and (closing := form.closing(flights)):
            yield sse.event(closing, event_id(request, last))
    except BlockrelayError as error:  # the gateway shuts down
        yield sse.event(error_body(error))
    yield sse.DONE

"""Turns followed requests into whole answers and event streams, the same way for every format."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar, Protocol

from blockrelay.errors import BlockrelayError
from blockrelay.failpoints import reach
from blockrelay.protocol.encoding.request_ids import Prefix
from blockrelay_gateway.draining.drain import GatewayEnds
from blockrelay_gateway.http import sse
from blockrelay_gateway.http.errors import error_body
from blockrelay_gateway.streaming.active_requests.active_request import ActiveRequest
from blockrelay_gateway.streaming.deltas import CollectedAnswer, Delta, Relay, failure
from blockrelay_gateway.streaming.event_ids import event_id
from blockrelay_gateway.streaming.readers import Readers


class ResponseFormat(Protocol):
    """The JSON of one kind of answer, as a stream.

    `index` is that of the choice in the answer, `fingerprint` is for `system_fingerprint`: the numerics ids of workers.
    """

    opens_early: ClassVar[bool]
    """The first chunk is sent when the request is accepted, not together with the first token."""
    prefix: ClassVar[Prefix]
    """The prefix of request ids in this format."""

    def opening(self, active: ActiveRequest) -> dict[str, Any] | None:
        """The chunk before that of the first token of any choice, for the first one; None if the format has none."""
        return None

    def chunk(self, index: int, delta: Delta, active: ActiveRequest, fingerprint: str) -> dict[str, Any]:
        """The chunk of one delta."""
        ...

    def problem(self, error: BlockrelayError, active: ActiveRequest) -> dict[str, Any]:
        """The last chunk of a request that failed with `error`."""
        ...

    def closing(self, requests: Sequence[ActiveRequest]) -> dict[str, Any] | None:
        """The chunk after the last delta of requests that all ended well; None if the format has none."""
        return None


class ResponseSource(Protocol):
    """The part of a cell that answers need."""

    @property
    def keep_alive_s(self) -> float:
        """Seconds of silence after which a stream sends a sign of life: a comment, or without ids an empty line."""
        ...

    def relay(self, active: ActiveRequest) -> Relay:
        """Returns a new Relay, for one reader of the request."""
        ...


async def collect(source: ResponseSource, readers: Readers) -> list[CollectedAnswer]:
    """Waits until every request has ended and returns their answers, also those of requests that failed.

    Raises GatewayEnds if the gateway ends first, and WireError for an entry whose log probabilities cannot be read.
    """
    relays = [source.relay(active) for active in readers.requests]
    answers = [CollectedAnswer() for _ in readers.requests]
    async for batch in readers.batches():
        for index, entry in batch:
            answers[index].add(relays[index].push(entry))
    return answers


async def stream(
    source: ResponseSource,
    readers: Readers,
    form: ResponseFormat,
    *,
    after: Sequence[int] | None = None,
    with_ids: bool = True,
) -> AsyncIterator[bytes]:
    """Yields the events of an answer, or those behind the positions `after` (`event_ids`), one for each request.

    A failure, also the end of the gateway, is an event of its own, never a silent close; `data: [DONE]` is the last.
    Without ids every line is `data: ...` or empty, because many clients know nothing else. There is still an event for
    each position, so that a client can count them. No event comes before the first token unless the format
    `opens_early`: clients measure the time to the first token by the first event. The caller closes `readers`.
    """
    requests = readers.requests
    relays = [source.relay(active) for active in requests]
    request_id, seen = requests[0].public_id(), list(after or (0,) * len(requests))

    def event(data: dict[str, Any], positions: Sequence[int]) -> bytes:
        return sse.event(data, event_id(request_id, positions) if with_ids else None)

    if with_ids:
        yield sse.RETRY
    opening = b""
    if after is None and (opened := form.opening(requests[0])):
        opening = event(opened, seen)
    if form.opens_early and opening:
        yield opening
        opening = b""
    try:
        async for batch in readers.batches(quiet_s=source.keep_alive_s):
            if not batch:
                yield sse.KEEP_ALIVE if with_ids else sse.PLAIN_KEEP_ALIVE
                continue
            parts: list[bytes] = []
            for index, entry in batch:
                delta = relays[index].push(entry)
                # A format may collect deltas, so it gets every one; the client has those up to `seen` already.
                error = failure(delta.end) if delta.end is not None else None
                if error is not None:
                    body = form.problem(error, requests[index])
                else:
                    body = form.chunk(index, delta, requests[index], requests[index].numerics)
                    parts.append(opening)
                    opening = b""
                # A failure is sent even if the client has seen later positions: Redis may have lost them since.
                if delta.position > seen[index] or error is not None:
                    seen[index] = max(seen[index] + 1, delta.position)
                    parts.append(event(body, seen))
            reach("gateway.before_event")
            yield b"".join(parts)
            reach("gateway.after_event")
        good = all(active.end is not None and failure(active.end) is None for active in requests)
        last = [active.tokens + 2 for active in requests]
        if good and seen != last and (closing := form.closing(requests)):
            yield event(closing, last)
    except GatewayEnds:
        where = f"/v1/requests/{requests[0].public_id(form.prefix)}/events"
        if form.opens_early or any(seen):
            where += f"?starting_after={'.'.join(map(str, seen))}"
        message = f"this gateway shuts down; the request goes on, read the rest at {where}"
        yield sse.event(error_body(GatewayEnds(message)))
    except BlockrelayError as error:
        yield sse.event(error_body(error))
    yield sse.DONE

"""From followed requests to what a client reads: whole answers and event streams, the same for every format."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar, Protocol

from blockrelay.errors import BlockrelayError
from blockrelay.failpoints import reach
from blockrelay.protocol.encoding.request_ids import Prefix
from blockrelay_gateway.draining.drain import GatewayEnds
from blockrelay_gateway.http import sse
from blockrelay_gateway.http.errors import error_body
from blockrelay_gateway.streaming.deltas import Answer, Delta, Relay, failure
from blockrelay_gateway.streaming.event_ids import event_id
from blockrelay_gateway.streaming.following.followed_request import FollowedRequest
from blockrelay_gateway.streaming.readers import Readers
from blockrelay_gateway.streaming.records import Records


class ResponseFormat(Protocol):
    """How one kind of answer looks, streamed or whole. `index` is that of the prompt.

    `opens_early`: its first chunk is sent when the request is accepted, not together with the first token.
    """

    opens_early: ClassVar[bool]

    @property
    def prefix(self) -> Prefix:
        """The beginning of ids in this format."""
        ...

    def opening(self, followed: FollowedRequest) -> dict[str, Any] | None:
        """A chunk before that of the first token, or None."""
        ...

    def chunk(self, index: int, delta: Delta, followed: FollowedRequest, fingerprint: str) -> dict[str, Any]:
        """The chunk of one delta."""
        ...

    def problem(self, error: BlockrelayError, followed: FollowedRequest) -> dict[str, Any]:
        """The chunk of a bad end."""
        ...

    def closing(self, requests: Sequence[FollowedRequest]) -> dict[str, Any] | None:
        """A chunk after the last delta of requests that all ended well, or None."""
        ...

    def whole(self, answers: Sequence[Answer], requests: Sequence[FollowedRequest]) -> dict[str, Any]:
        """The answer that is not streamed; every request has ended well."""
        ...

    def background(self, followed: FollowedRequest, status: str) -> dict[str, Any]:
        """The answer to a background request."""
        ...


class Source(Protocol):
    """Where answers come from: a cell."""

    @property
    def keep_alive_s(self) -> float:
        """Seconds between comments on a silent stream."""
        ...

    @property
    def records(self) -> Records: ...

    def relay(self, followed: FollowedRequest) -> Relay:
        """A fresh one for one reader."""
        ...


async def collect(source: Source, readers: Readers) -> list[Answer]:
    """Wait for the end of every request. Raises GatewayEnds when the gateway shuts down first."""
    relays = [source.relay(followed) for followed in readers.requests]
    answers = [Answer() for _ in readers.requests]
    async for batch in readers.batches():
        for index, entry in batch:
            answers[index].add(relays[index].push(entry))
    return answers


async def stream(
    source: Source,
    readers: Readers,
    form: ResponseFormat,
    *,
    after: Sequence[int] | None = None,
    with_ids: bool = True,
) -> AsyncIterator[bytes]:
    """The events of an answer, or those behind the positions `after` (`event_ids`), one for each request.

    A bad end is an event of its own, never a silent close. Without ids every line is `data: ...`, which is all that
    many readers know; there is an event for each position all the same, so that their number says how far one is.
    What takes the time to the first token takes it to the first event: none comes before a token but where the format
    `opens_early`.
    """
    requests = readers.requests
    relays = [source.relay(followed) for followed in requests]
    request, seen = requests[0].public_id(), list(after or (0,) * len(requests))

    def event(data: dict[str, Any], positions: Sequence[int]) -> bytes:
        return sse.event(data, event_id(request, positions) if with_ids else None)

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
                # A format may keep what it has shown, so it sees every delta; the client has those up to `seen`.
                error = failure(delta.end) if delta.end is not None else None
                if error is not None:
                    body = form.problem(error, requests[index])
                else:
                    body = form.chunk(index, delta, requests[index], requests[index].numerics)
                    parts.append(opening)
                    opening = b""
                # A bad end is told even where the client has seen more, and behind that: Redis may have lost it before.
                if delta.position > seen[index] or error is not None:
                    seen[index] = max(seen[index] + 1, delta.position)
                    parts.append(event(body, seen))
            reach("gateway.before_event")
            yield b"".join(parts)
            reach("gateway.after_event")
        good = all(followed.end is not None and failure(followed.end) is None for followed in requests)
        last = [followed.tokens + 2 for followed in requests]
        if good and seen != last and (closing := form.closing(requests)):
            yield event(closing, last)
    except GatewayEnds:
        where = f"/v1/requests/{requests[0].public_id(form.prefix)}/events"
        if form.opens_early or any(seen):
            where += f"?starting_after={'.'.join(map(str, seen))}"
        said = f"this gateway shuts down; the request goes on, read the rest at {where}"
        yield sse.event(error_body(GatewayEnds(said)))
    except BlockrelayError as error:
        yield sse.event(error_body(error))
    yield sse.DONE

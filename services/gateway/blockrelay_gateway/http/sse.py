"""Responses to clients that may leave at any time: server-sent events and large answers."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from blockrelay_gateway.http.errors import JsonAnswer, to_json
from blockrelay_gateway.http.front import IS_HEAD

T = TypeVar("T")
#: Milliseconds that an EventSource waits before it connects again; part of the first event of a stream with ids.
RETRY = b"retry: 1000\n"
#: Sent after a silence. In a stream with ids it is a comment: OpenAI's client takes an empty line after any `id:` for
#: an event, and fails on it. In one without ids it is an empty line: benchmark tools skip these and fail on comments.
KEEP_ALIVE, PLAIN_KEEP_ALIVE = b": keep-alive\n", b"\n"
DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any], event_id: str | None = None) -> bytes:
    """Encodes one event. A client sends `event_id` back as Last-Event-ID to continue the stream behind it."""
    head = b"" if event_id is None else b"id: " + event_id.encode() + b"\n"
    return head + b"data: " + to_json(data) + b"\n\n"


class EventStream(StreamingResponse):
    """Sends events until they end or the client leaves; the context manager `held` is closed in every case.

    A HEAD request gets the headers only.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        held: AbstractContextManager[object],
        headers: Mapping[str, str],
    ) -> None:
        ours = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers={**ours, **headers})
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            if scope.get(IS_HEAD):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": b""})
                return
            await super().__call__(scope, receive, send)


class LargeAnswer(StreamingResponse):
    """Sends JSON of `size` bytes in pieces.

    The context manager `held`, which gives its memory back, is closed when all is sent, when the client leaves, or when
    the client has not read a piece within `within_s` seconds.
    """

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        size: int,
        held: AbstractContextManager[object],
        headers: Mapping[str, str],
        within_s: float,
    ) -> None:
        own = {**headers, "content-length": str(size)}
        super().__init__(pieces, headers=own, media_type=JsonAnswer.media_type)
        self._held, self._within_s = held, within_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def patient(message: Message) -> None:
            try:
                async with asyncio.timeout(self._within_s):
                    await send(message)
            except TimeoutError:
                raise OSError("the client does not read the answer") from None  # handled like a client that left

        with self._held:
            try:
                await super().__call__(scope, receive, patient)
            finally:
                self.body_iterator = _nothing()  # frees the tensors, which the old iterator refers to


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Returns the result of `work`, or raises its error; None if the client left first, and then `work` is cancelled.

    The body must have been read before: all messages of `request` until the disconnect are dropped.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(request: Request) -> None:
    """Waits until the client leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass

"""TCP connections of clients: limits of time and size for heads, messages and idle connections (uvicorn)."""

import asyncio
import select
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState

from blockrelay.errors import LimitExceeded
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.draining.course import Phase
from blockrelay_gateway.draining.drain import Drain
from blockrelay_gateway.http.body_budget import BodyBudget, BodyShare, ReceivedBody
from blockrelay_gateway.http.body_limit import RECEIVED
from blockrelay_gateway.policy import (
    DRAIN_FACTOR,
    DRAIN_IDLE_S,
    HEAD_BYTES,
    IDLE_CONNECTION_S,
    LARGE_MESSAGE_BYTES,
    LAST_ACCEPTS_S,
    LAST_CLOSE_S,
    LAST_REQUEST_S,
    LAST_WORDS_S,
    MESSAGE_ROOM_POLL_S,
)

#: Turns of the event loop from a connection that waits to be accepted to one that the server knows.
ACCEPTING_TURNS = 4

#: Key of a `websocket.send` message whose text comes in pieces, an async iterator of UTF-8: one message, in fragments.
#: There is at least one piece. A client that does not read them in time is disconnected.
PIECES = "pieces"
#: What a fragment of a message weighs beside its bytes: an object and its place in a list.
FRAGMENT_BYTES = 64


def server_config(app: FastAPI, settings: GatewaySettings, bodies: BodyBudget, drain: Drain) -> uvicorn.Config:
    """Returns uvicorn's configuration for the gateway.

    It uses h11, because httptools has no limit for heads, and no compression, which would take seconds for a tensor of
    100 MB.
    """
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        http=_patient_for(settings.arrival_timeout_s, settings.max_connections, drain),
        h11_max_incomplete_event_size=HEAD_BYTES,
        ws=_socket_for(settings.arrival_timeout_s, bodies, drain, DRAIN_FACTOR * settings.max_body_bytes),
        ws_max_size=settings.max_body_bytes,
        ws_per_message_deflate=False,
        ws_max_queue=1,  # messages of one socket that wait to be read
        timeout_graceful_shutdown=int(LAST_WORDS_S),
        timeout_keep_alive=IDLE_CONNECTION_S,
        server_header=False,
    )


async def accept_the_last(listeners: Sequence[socket.socket]) -> None:
    """Waits until no connection waits to be accepted, so that closing the listeners resets none.

    It waits for LAST_ACCEPTS_S seconds at most, because connections may never stop coming. To its client a connection
    is open, and may carry a request, before it is accepted here.
    """
    loop = asyncio.get_running_loop()
    until, quiet = loop.time() + LAST_ACCEPTS_S, 0
    while quiet < ACCEPTING_TURNS and loop.time() < until:
        looking = select.poll()
        for listener in listeners:
            looking.register(listener, select.POLLIN)
        quiet = 0 if looking.poll(0) else quiet + 1
        if quiet < ACCEPTING_TURNS:
            await asyncio.sleep(0)


def _patient_for(arrival_s: float, max_connections: int, drain: Drain) -> type[H11Protocol]:
    """Returns the HTTP protocol class, which closes connections whose request head is late.

    A head must be complete `arrival_s` seconds after the connection opened, or after the head's first byte; uvicorn
    itself waits without end. If more than `max_connections` connections have no request, the one that has waited
    longest is closed: so clients that only connect keep no other client out, whose request comes at once.

    When the server ends, idle connections are closed: at once, or after LAST_REQUEST_S while requests still go on.
    """
    silent: dict[H11Protocol, None] = {}  # the longest first

    class Connection(H11Protocol):
        _due: float | None = None  # when the head that has begun must be complete, by the loop's clock

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().connection_made(transport)
            self._await_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self._idle() or self.transport.is_closing() or self.transport.get_protocol() is not self:
                self._due = None
                silent.pop(self, None)
            else:
                self._await_head()

        def shutdown(self) -> None:
            if drain.phase != Phase.FINISHING:
                super().shutdown()
            elif self._idle():
                self._close_soon()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self.transport.is_closing() and self.cycle.response_complete:
                self._count()
                if drain.phase == Phase.FINISHING:  # an answer that began before the end did not say so
                    self._close_soon()
                elif drain.phase > Phase.FINISHING:
                    self.timeout_keep_alive_handler()

        def connection_lost(self, exc: Exception | None) -> None:
            silent.pop(self, None)
            super().connection_lost(exc)

        def _idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]

        def _close_soon(self) -> None:
            self.loop.call_later(LAST_REQUEST_S, self._close_if_idle)

        def _close_if_idle(self) -> None:
            if self._idle():
                self.timeout_keep_alive_handler()

        def _await_head(self) -> None:
            """Starts the timer for the next head: uvicorn's own for idle connections, which the next byte stops."""
            if self._due is None:
                self._due = self.loop.time() + arrival_s
            self.timeout_keep_alive_task = self.loop.call_at(self._due, self.timeout_keep_alive_handler)
            self._count()

        def _count(self) -> None:
            silent.setdefault(self)
            if len(silent) > max_connections:
                longest = next(iter(silent))
                del silent[longest]
                longest.timeout_keep_alive_handler()

    return Connection


def _socket_for(arrival_s: float, bodies: BodyBudget, drain: Drain, most: int) -> type[WebSocketsSansIOProtocol]:
    """Returns the WebSocket protocol class, whose messages count in the budget of bodies while they arrive.

    A socket is not read while the budget has no room. A message that takes longer than `arrival_s` seconds ends its
    socket (1008), and so does one over the size limit (1009); up to `most` bytes that still come are read and dropped.
    uvicorn itself reads everything and waits without end, and at its own end closes sockets whose messages are not
    answered. Here the conversation closes its socket (`drain`).
    """

    class Socket(WebSocketsSansIOProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._share = BodyShare(bodies)
            self._held = self._fragments = 0  # bytes of the fragments that are there, and how many they are
            self._forwarded_bodies: list[ReceivedBody] = []
            self._overdue: asyncio.TimerHandle | None = None
            self._waiting: asyncio.TimerHandle | None = None  # for room
            self._lingering: asyncio.TimerHandle | None = None
            self._discarded = 0

        def data_received(self, data: bytes) -> None:
            if self._lingering is not None:
                self._discard(len(data))
                return
            super().data_received(data)
            if self.handshake_complete and not self.close_sent:
                self._count()

        def handle_parser_exception(self) -> None:
            """Ends the socket as uvicorn does, but keeps the connection until the client has read the reason.

            If it were closed at once, with bytes of the client on their way, it would be reset.
            """
            assert self.conn.close_sent is not None
            code, reason = self.conn.close_sent.code, self.conn.close_sent.reason
            self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
            self._settle()
            self._discard(0)
            self.transport.resume_reading()

        def _discard(self, size: int) -> None:
            """Drops `size` bytes and reads on until the client is silent for DRAIN_IDLE_S, up to `most` bytes."""
            self._discarded += size
            if self._lingering is not None:
                self._lingering.cancel()
            if self._discarded > most:
                self.transport.close()
            else:
                self._lingering = self.loop.call_later(DRAIN_IDLE_S, self.transport.close)

        def eof_received(self) -> None:
            if self._lingering is not None:
                self.transport.close()

        def shutdown(self) -> None:
            if drain.has_begun and not self.close_sent:
                self.close_timeout = LAST_CLOSE_S
            else:
                super().shutdown()

        def connection_lost(self, exc: Exception | None) -> None:
            self._settle()
            if self._lingering is not None:
                self._lingering.cancel()
            for message in self._forwarded_bodies:
                if not message.taken:  # nobody will
                    message.take()
                    message.share.give_back()
            super().connection_lost(exc)

        def send_receive_event_to_app(self) -> None:
            large = self.curr_msg_data_type == "text" and sum(map(len, self.frames)) >= LARGE_MESSAGE_BYTES
            if large and not self.close_sent:
                content = self.frames[0] if len(self.frames) == 1 else b"".join(self.frames)
                self.frames = []
                share = BodyShare(bodies)
                share.add(len(content))  # what has arrived of it leaves this socket's share at the same moment
                received = ReceivedBody(bytes(content), share)
                self._forwarded_bodies = [one for one in self._forwarded_bodies if not one.taken] + [received]
                self.queue.put_nowait(cast(Any, {"type": "websocket.receive", "text": "", RECEIVED: received}))
                if not self.read_paused:
                    self.read_paused = True
                    self.transport.pause_reading()
            else:
                super().send_receive_event_to_app()
            self._settle()

        def _count(self) -> None:
            """Counts the bytes of a message that is arriving in the budget; without room, pauses reading."""
            for fragment in self.frames[self._fragments :]:
                self._held += len(fragment) + FRAGMENT_BYTES
            self._fragments = len(self.frames)
            self._share.give_back()
            there = self._held + len(self.conn.reader.buffer)
            if there and self._overdue is None:
                self._overdue = self.loop.call_later(arrival_s, self._give_up)
            try:
                self._share.take(there)
            except LimitExceeded:
                self.transport.pause_reading()
                self._waiting = self.loop.call_later(MESSAGE_ROOM_POLL_S, self._go_on)

        def _go_on(self) -> None:
            self._waiting = None
            self._count()
            if self._waiting is None and not self.read_paused:
                self.transport.resume_reading()

        def _settle(self) -> None:
            self._held = self._fragments = 0
            self._share.give_back()
            for timer in (self._overdue, self._waiting):
                if timer is not None:
                    timer.cancel()
            self._overdue = self._waiting = None

        def _give_up(self) -> None:
            self._settle()
            self.conn.fail(1008, f"the message did not arrive within {arrival_s:g} seconds")
            self.handle_parser_exception()

        async def send(self, message: Any) -> None:
            pieces: AsyncIterator[bytes] | None = message.get(PIECES)
            if pieces is None:
                await super().send(message)
                return
            has_begun = False
            try:
                async for piece in pieces:
                    async with asyncio.timeout(arrival_s):  # it holds memory until it is read
                        await self.writable.wait()
                    (self.conn.send_continuation if has_begun else self.conn.send_text)(piece, fin=False)
                    has_begun = True
                    self.transport.write(b"".join(self.conn.data_to_send()))
                self.conn.send_continuation(b"", fin=True)
                self.transport.write(b"".join(self.conn.data_to_send()))
            except TimeoutError:
                self.conn.fail(1008, f"the answer was not read within {arrival_s:g} seconds")
                self.handle_parser_exception()
                raise ClientDisconnected from None
            except InvalidState:
                raise ClientDisconnected from None

    return Socket

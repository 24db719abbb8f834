"""TCP connections of clients: how long a head may take to arrive, how long it may be, how long silence is kept."""

import asyncio

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from blockrelay.settings import GatewaySettings
from blockrelay_gateway.crowd import HEAD_BYTES

#: After a signal, streams get their error event at once; this bounds clients that do not read it.
SHUTDOWN_S = 5
#: An idle connection lives longer here than in usual clients and proxies, so that they close it and never write into
#: one that we are closing.
KEEP_ALIVE_S = 75


def server_config(app: FastAPI, settings: GatewaySettings) -> uvicorn.Config:
    """h11: httptools knows no bound of a head."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        http=_patient_for(settings.arrival_timeout_s),
        h11_max_incomplete_event_size=HEAD_BYTES,
        ws_max_size=settings.max_body_bytes,
        ws_max_queue=1,  # messages of one socket that wait to be read
        timeout_graceful_shutdown=SHUTDOWN_S,
        timeout_keep_alive=KEEP_ALIVE_S,
        server_header=False,
    )


def _patient_for(arrival_s: float) -> type[H11Protocol]:
    """HTTP that closes a connection on which no head has arrived `arrival_s` after its beginning, or the head's.

    uvicorn itself waits for ever, before the first request and for the rest of any head.
    """

    class Connection(H11Protocol):
        _due: float | None = None  # when the head that has begun must be complete, by the loop's clock

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().connection_made(transport)
            self._await_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            at_work = self.cycle is not None and not self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]
            if at_work or self.transport.is_closing() or self.transport.get_protocol() is not self:
                self._due = None
            else:
                self._await_head()

        def _await_head(self) -> None:
            """By uvicorn's own timer for idle connections, which stops it at the next byte."""
            if self._due is None:
                self._due = self.loop.time() + arrival_s
            self.timeout_keep_alive_task = self.loop.call_at(self._due, self.timeout_keep_alive_handler)

    return Connection

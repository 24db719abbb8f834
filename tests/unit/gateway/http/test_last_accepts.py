"""Connections that a gateway has not accepted yet when it stops to listen: they are served, not reset."""

import asyncio
import socket
from typing import Any, cast

import uvicorn

from blockrelay_gateway.__main__ import GatewayServer

REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def _answers(connections: int) -> list[bytes]:
    with socket.create_server(("127.0.0.1", 0), backlog=connections) as listener:
        config = uvicorn.Config(_app, http="h11", lifespan="off", log_config=None)
        config.load()
        server = GatewayServer(config, cast(Any, None))
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])
        clients = [socket.create_connection(listener.getsockname()) for _ in range(connections)]
        for client in clients:  # the event loop has had no turn yet: none is accepted
            client.sendall(REQUEST)
        await server.shutdown(sockets=[listener])
    return [await _whole(client) for client in clients]


async def _whole(client: socket.socket) -> bytes:
    reader, writer = await asyncio.open_connection(sock=client)
    try:
        return await reader.read()
    finally:
        writer.close()


def test_connections_that_wait_to_be_accepted_are_served_when_listening_ends() -> None:
    assert all(answer.endswith(b"ok") for answer in asyncio.run(_answers(8)))

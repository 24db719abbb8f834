"""The socket that the gateway listens on."""

import asyncio
import socket

from blockrelay_gateway.__main__ import tcp_socket


async def test_accepted_connections_send_small_writes_at_once() -> None:
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = tcp_socket("127.0.0.1")
    listener.bind(("127.0.0.1", 0))
    async with await asyncio.start_server(answer, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await accepted
        writer.close()
        await writer.wait_closed()

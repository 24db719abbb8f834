"""The socket that the gateway listens on, and the signals that end it."""

import asyncio
import signal
import socket
from collections.abc import Iterator

import pytest

from blockrelay.settings import GatewaySettings
from blockrelay_gateway.__main__ import GatewayServer, tcp_socket
from blockrelay_gateway.app import create_app
from blockrelay_gateway.http.server import server_config
from tests.support.waiting import wait_until


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


@pytest.fixture
def deaf_to_sigterm() -> Iterator[None]:
    """Ignores SIGTERM in the test process: a server that ends raises the signal that ended it once more."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("deaf_to_sigterm")
async def test_a_signal_touches_nothing_in_the_middle_of_other_work(settings: GatewaySettings) -> None:
    app = create_app(settings)
    gateway = app.state.gateway
    server = GatewayServer(server_config(app, settings, gateway.bodies, gateway.drain), gateway)
    listener = tcp_socket("127.0.0.1")
    listener.bind(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve([listener]))
    await asyncio.to_thread(wait_until, lambda: server.started, "the gateway listens")
    signal.raise_signal(signal.SIGTERM)
    assert not gateway.drain.has_begun, "the handler itself has told the others"
    await asyncio.sleep(0)
    assert gateway.drain.has_begun
    await serving

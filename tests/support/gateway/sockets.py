"""Requests byte by byte."""

import socket

from tests.support.gateway.played import RunningGateway


def connected(gateway: RunningGateway) -> socket.socket:
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def to_its_end(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    return b"".join(iter(lambda: connection.recv(4096), b""))


def send_head(gateway: RunningGateway, length: int) -> socket.socket:
    connection = connected(gateway)
    connection.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n".encode())
    return connection

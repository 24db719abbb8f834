"""Ports of gateways stay theirs between the look for them and a gateway that listens, again and again."""

import socket

import pytest

from blockrelay.errors import UsageError
from blockrelay_gateway.__main__ import tcp_socket
from blockrelay_launcher.supervisor.ports import CAN_KEEP, kept_ports

HOST = "127.0.0.1"


def listening(port: int) -> socket.socket:
    """As a gateway does."""
    found = tcp_socket(HOST)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind((HOST, port))
    found.listen()
    return found


def test_a_gateway_listens_on_its_port_as_often_as_it_starts() -> None:
    with kept_ports(HOST, 0, 2) as ports:
        assert len(set(ports)) == 2
        for _ in range(3):
            for port in ports:
                listening(port).close()


@pytest.mark.skipif(not CAN_KEEP, reason="only Linux keeps ports so")
def test_nobody_else_is_given_it_meanwhile() -> None:
    with kept_ports(HOST, 0, 1) as (port,), socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind((HOST, port))
        with kept_ports(HOST, 0, 50) as others:
            assert port not in others


def test_a_port_that_somebody_listens_on_is_refused_and_nothing_is_kept() -> None:
    with listening(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} on {HOST}: .*in use; choose another with --port"):
            kept_ports(HOST, port, 1).__enter__()
    listening(port).close()


def test_afterwards_it_is_free() -> None:
    with kept_ports(HOST, 0, 1) as (port,):
        pass
    with socket.socket() as other:
        other.bind((HOST, port))

"""Finds the ports of the gateways, and keeps them from other programs while `up` runs.

Before a gateway listens (and after its death) the kernel may give its port to another program, even to a client as the
local end of a connection. A socket that is bound and does not listen prevents that: the gateway can bind beside it
(both set SO_REUSEADDR), and a program that asks for any port gets another one. This works on Linux; elsewhere the port
is only checked.
"""

import errno
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from blockrelay.errors import UsageError

CAN_KEEP = sys.platform == "linux"


@contextmanager
def kept_ports(host: str, port: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yields `count` consecutive ports from `port` on, and keeps them until the context ends.

    With `port` 0 they are any free ones, which need not be consecutive.

    Raises UsageError if a gateway could not listen on one of them.
    """
    with ExitStack() as keepers, ExitStack() as probes:
        ports = tuple(_usable_port(host, port and port + n, keepers, probes) for n in range(count))
        probes.close()
        yield ports


def _usable_port(host: str, port: int, keepers: ExitStack, probes: ExitStack) -> int:
    try:
        keeper = keepers.enter_context(_bound(host, port))
        port = int(keeper.getsockname()[1])
        if not CAN_KEEP:
            keeper.close()
        probes.enter_context(_bound(host, port)).listen()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        other = (
            "--host"
            if isinstance(error, socket.gaierror) or getattr(error, "errno", 0) == errno.EADDRNOTAVAIL
            else "--port"
        )
        raise UsageError(f"port {port} on {host}: {why}; choose another with {other}") from error
    return port


def _bound(host: str, port: int) -> socket.socket:
    """Returns a new TCP socket that is bound with SO_REUSEADDR. Raises OSError."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound

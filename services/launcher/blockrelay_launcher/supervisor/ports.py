"""The ports of the gateways: found once, and kept from other programs for as long as `up` runs.

Between the look for a free port and a gateway that listens (again, after its death) anybody may be given the port, a
client for its end of a connection too. A socket that is bound and does not listen prevents that: the gateway may bind
beside it (both say SO_REUSEADDR), and whoever asks for any port gets another one. So it is on Linux; elsewhere the port
is only looked at.
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
    """`port` and those after it, or free ones for 0. Raises UsageError when nobody can listen on one."""
    with ExitStack() as keepers, ExitStack() as probes:
        found = tuple(_usable_port(host, port and port + n, keepers, probes) for n in range(count))
        probes.close()
        yield found


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
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except BaseException:
        found.close()
        raise
    return found

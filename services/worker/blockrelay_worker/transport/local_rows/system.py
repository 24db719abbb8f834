"""What only Linux has: sockets that keep packets apart and say who is at the other end, descriptors of processes."""

import os
import select
import socket
import struct
import sys

HAS_LOCAL_ROWS = sys.platform == "linux"


def packet_socket() -> socket.socket:
    """Raises OSError where there is none."""
    if sys.platform != "linux":
        raise OSError("this system has no such sockets")
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end. Process 0: of another process namespace."""
    if sys.platform != "linux":
        raise OSError("this system does not say who is at the other end")
    process, user, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process, user


def own_user() -> int:
    return os.geteuid() if sys.platform != "win32" else 0


def send_with(connection: socket.socket, packet: bytes, descriptor: int) -> None:
    if sys.platform != "win32":
        socket.send_fds(connection, [packet], [descriptor])


def receive_with(connection: socket.socket, most: int) -> tuple[bytes, list[int]]:
    """A packet of at most `most` bytes, and the file descriptors (at most one) that came along: they are ours to close.
    Raises OSError."""
    if sys.platform == "win32":
        raise OSError("this system has no such sockets")
    packet, descriptors, _, _ = socket.recv_fds(connection, most, 1)
    return packet, descriptors


def process_descriptor(process: int) -> int | None:
    """Readable as soon as that process has ended. None where the system does not give one."""
    if sys.platform != "linux" or process <= 0:
        return None
    try:
        return os.pidfd_open(process)
    except OSError:
        return None  # an older kernel, or one that may not say


def readable(descriptor: int, wait_s: float) -> bool:
    if sys.platform == "win32":
        return False
    look = select.poll()
    look.register(descriptor, select.POLLIN)
    return bool(look.poll(wait_s * 1000))

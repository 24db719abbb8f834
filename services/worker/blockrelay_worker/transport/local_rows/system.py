"""Calls that only Linux has: packet sockets with peer credentials, and file descriptors of processes."""

import os
import select
import socket
import struct
import sys

#: True where workers of one host can send each other rows through shared memory.
HAS_LOCAL_ROWS = sys.platform == "linux"


def packet_socket() -> socket.socket:
    """Creates a Unix socket of type SOCK_SEQPACKET. Raises OSError on other systems than Linux."""
    if sys.platform != "linux":
        raise OSError("this system has no such sockets")
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def peer(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id at the other end of a Unix socket. Process 0: in another process namespace.

    Raises OSError on other systems than Linux.
    """
    if sys.platform != "linux":
        raise OSError("this system does not say who is at the other end")
    process, user, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process, user


def own_user() -> int:
    """The effective user id of this process; 0 on Windows."""
    return os.geteuid() if sys.platform != "win32" else 0


def send_with(connection: socket.socket, packet: bytes, descriptor: int) -> None:
    """Sends a packet together with a file descriptor, which stays the caller's to close.

    Raises OSError if it cannot, BlockingIOError if a socket that does not block is full. Does nothing on Windows, which
    has no such sockets.
    """
    if sys.platform != "win32":
        socket.send_fds(connection, [packet], [descriptor])


def receive_with(connection: socket.socket, max_bytes: int) -> tuple[bytes, list[int]]:
    """Receives a packet and at most one file descriptor, which the caller closes. Cuts a packet at `max_bytes` bytes.

    The packet is empty if the other end has closed. Raises OSError, which is BlockingIOError if nothing waits on a
    socket that does not block.
    """
    if sys.platform == "win32":
        raise OSError("this system has no such sockets")
    packet, descriptors, _, _ = socket.recv_fds(connection, max_bytes, 1)
    return packet, descriptors


def process_descriptor(process: int) -> int | None:
    """A file descriptor (pidfd) that is readable once the process has ended. The caller closes it.

    None if there is no such process any more, or if the system gives none.
    """
    if sys.platform != "linux" or process <= 0:
        return None
    try:
        return os.pidfd_open(process)
    except OSError:
        return None  # it has ended, an older kernel, or no permission


def readable(descriptor: int, wait_s: float) -> bool:
    """Waits up to `wait_s` (>= 0) seconds until a file descriptor is readable; True if it is. False on Windows."""
    if sys.platform == "win32":
        return False
    look = select.poll()
    look.register(descriptor, select.POLLIN)
    return bool(look.poll(wait_s * 1000))

"""The sender's end of a connection to one worker of this host. Used by the engine thread only."""

import os
import time
from collections.abc import Mapping

from blockrelay.errors import WireError
from blockrelay_worker.policy import CONNECT_S
from blockrelay_worker.transport.local_rows.frames import WELCOME, Address, Hello, describe, read_count
from blockrelay_worker.transport.local_rows.ring import RingSpace, new_ring
from blockrelay_worker.transport.local_rows.system import (
    own_user,
    packet_socket,
    peer,
    process_descriptor,
    readable,
    send_with,
)

#: Maximum number of unread messages. The receiver's counts for that many fit into the socket's buffer.
MAX_UNREAD = 64


class LinkLost(Exception):
    """Raised when the other worker has closed the connection or breaks the protocol."""


class LocalLink:
    """A connection to a worker of this host. `pidfd`: file descriptor of its process; None if the system gives none."""

    def __init__(self, address: Address, *, worker_id: str, ring_bytes: int) -> None:
        """Connects to `address` as the worker with id `worker_id`. Raises OSError or LinkLost if that fails.

        The ring has `ring_bytes` (>= 1) bytes. Waits up to CONNECT_S seconds for the answer to the Hello.
        """
        self._socket = packet_socket()
        self.pidfd: int | None = None
        self._slow = False
        try:
            self._socket.settimeout(CONNECT_S)
            self._socket.connect(address.socket_name)
            process, user = peer(self._socket)
            if user != own_user():
                raise LinkLost("who listens there runs as another user")
            ring, self._ring = new_ring(ring_bytes)
            try:
                send_with(self._socket, Hello(worker_id, address.secret).encode(), ring)
            finally:
                os.close(ring)
            self._space = RingSpace(ring_bytes)
            if self._socket.recv(len(WELCOME)) != WELCOME:
                raise LinkLost("it did not let us in")
            self._socket.setblocking(False)
            self.pidfd = process_descriptor(process)
            self.look()  # the connection is still open, so the pidfd is that of the right process
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the connection; the receiver can still read what was sent."""
        self._socket.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None

    @property
    def unread(self) -> int:
        """Number of unread messages at the last `look`."""
        return self._space.unread

    def fits(self, fields: Mapping[str, bytes]) -> bool:
        """True if the message fits into an empty ring."""
        return sum(map(len, fields.values())) <= self._space.size

    def look(self) -> None:
        """Reads the receiver's counts, which free space in the ring.

        Raises LinkLost if the receiver has closed the connection or breaks the protocol.
        """
        try:
            while packet := self._socket.recv(64):
                self._space.was_read(read_count(packet))
                self._slow = False
        except BlockingIOError:
            return
        except (OSError, WireError) as error:
            raise LinkLost(str(error)) from error
        raise LinkLost("it has closed the connection")

    def send(self, fields: Mapping[str, bytes], wait_s: float) -> bool:
        """Sends a message. False if there was no room for it within `wait_s` seconds.

        After that, calls without room return at once, until the receiver has read something. For a message that does
        not fit (see `fits`) there is never room. The names of `fields` must be those of a kind in `frames.KINDS`, in
        that order. Raises LinkLost if the receiver has closed the connection or breaks the protocol.
        """
        self.look()
        give_up = time.monotonic() + (0.0 if self._slow else wait_s)
        length = sum(map(len, fields.values()))
        while (offset := self._space.take(length) if self.unread < MAX_UNREAD else None) is None:
            left = give_up - time.monotonic()
            if left <= 0:
                self._slow = self._slow or wait_s > 0
                return False
            readable(self._socket.fileno(), left)
            self.look()
        at = offset
        for value in fields.values():
            self._ring[at : at + len(value)] = value
            at += len(value)
        try:
            self._socket.send(describe(fields, offset))
        except OSError as error:  # also BlockingIOError: the socket has room for MAX_UNREAD packets
            raise LinkLost(str(error)) from error
        return True

    def process_ended(self, wait_s: float) -> bool:
        """True if the process at the other end is known to have ended; waits for that up to `wait_s` seconds."""
        return self.pidfd is not None and readable(self.pidfd, wait_s)

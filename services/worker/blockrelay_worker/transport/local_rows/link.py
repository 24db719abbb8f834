"""The sender's end of a connection to one worker of this host. Used by the engine thread only."""

import os
import time
from collections.abc import Mapping

from blockrelay.errors import WireError
from blockrelay_worker.transport.local_rows.frames import WELCOME, Address, Hello, describe, read_count
from blockrelay_worker.transport.local_rows.ring import Space, new_ring
from blockrelay_worker.transport.local_rows.system import (
    own_user,
    packet_socket,
    peer,
    process_descriptor,
    readable,
    send_with,
)

#: How long a worker may take to let us in. Seconds.
CONNECT_S = 1.0
#: Messages that may be unread; what it tells of them then finds room in the socket.
MAX_UNREAD = 64


class LinkLost(Exception):
    """The worker at the other end has closed the connection, or it is not what we take it for."""


class LocalLink:
    """A connection that was accepted. `pidfd`: the process at the other end, None where the system does not say."""

    def __init__(self, address: Address, *, worker: str, ring_bytes: int) -> None:
        """Connect as `worker`. Raises OSError and LinkLost when that does not come about."""
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
                send_with(self._socket, Hello(worker, address.secret).encode(), ring)
            finally:
                os.close(ring)
            self._space = Space(ring_bytes)
            if self._socket.recv(len(WELCOME)) != WELCOME:
                raise LinkLost("it did not let us in")
            self._socket.setblocking(False)
            self.pidfd = process_descriptor(process)
            self.look()  # it lives still, so the process is the right one
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """What was sent can still be read."""
        self._socket.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None

    @property
    def unread(self) -> int:
        """Messages, as of the last look."""
        return self._space.unread

    @property
    def has_room(self) -> bool:
        return self._space.unread < MAX_UNREAD

    def fits(self, fields: Mapping[str, bytes]) -> bool:
        """Whether the message could ever be sent."""
        return sum(map(len, fields.values())) <= self._space.size

    def look(self) -> None:
        """Hear what has been read. Raises LinkLost."""
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
        """Send a message. False when there was no room for it within `wait_s` seconds; whoever has taken nothing since
        is not waited for again. Raises LinkLost."""
        self.look()
        give_up = time.monotonic() + (0.0 if self._slow else wait_s)
        length = sum(map(len, fields.values()))
        while (offset := self._space.take(length) if self.has_room else None) is None:
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
        except OSError as error:  # also one that would block: there is room for MAX_UNREAD
            raise LinkLost(str(error)) from error
        return True

    def process_ended(self, wait_s: float) -> bool:
        """Whether the process at the other end is known to be over, in `wait_s` seconds."""
        return self.pidfd is not None and readable(self.pidfd, wait_s)

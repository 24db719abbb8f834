"""The local inbox: a thread that accepts connections from workers of this host and reads messages from their rings."""

import contextlib
import hmac
import mmap
import os
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field

from blockrelay.errors import RedisTrouble, WireError
from blockrelay.failpoints import reach
from blockrelay.observability.logs import get
from blockrelay_worker.policy import HELLO_S, MAX_STRANGERS
from blockrelay_worker.transport.events import Event
from blockrelay_worker.transport.inbox_reader import decode_entry
from blockrelay_worker.transport.local_rows.frames import (
    MAX_PACKET,
    WELCOME,
    Address,
    Hello,
    read_descriptor,
    tell_count,
)
from blockrelay_worker.transport.local_rows.ring import map_ring
from blockrelay_worker.transport.local_rows.system import own_user, packet_socket, peer, receive_with
from blockrelay_worker.transport.mailbox import Mailbox

#: Maximum number of packets read from one sender before the next one's turn.
_TURN = 16


@dataclass(slots=True, eq=False)
class _Sender:
    """One connection; before its Hello `ring` is None."""

    socket: socket.socket
    since: float
    worker: str = ""
    ring: mmap.mmap | None = None
    copied: int = field(default=0)

    def close(self) -> None:
        self.socket.close()
        if self.ring is not None:
            self.ring.close()


class LocalInbox(threading.Thread):
    """Receives messages from workers of this host; listens from its creation until `close`.

    Call `start` to have messages read. `address` has the socket's name and a secret, for this worker's record.
    Accepts processes of the same user that know the secret. A message is copied before it is checked, since its
    sender could still change it. A malformed one ends the connection; requests with lost rows run again.
    """

    def __init__(self, mailbox: Mailbox[Event]) -> None:
        """Begins to listen. Raises OSError if this system cannot, or if the address is in use."""
        super().__init__(name="local inbox", daemon=True)
        self.address = Address.new()
        self._mailbox = mailbox
        self._senders: dict[int, _Sender] = {}
        self._listener = packet_socket()
        self._awake, self._waker = socket.socketpair()
        try:
            self._listener.bind(self.address.socket_name)
            self._listener.listen(MAX_STRANGERS)
            self._listener.setblocking(False)
        except OSError:
            self._close_all()
            raise

    def close(self) -> None:
        """Ends the thread and closes all connections; senders see that at once.

        Needs `start`: without it the socket and the connections stay open.
        """
        self._waker.close()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        with selectors.DefaultSelector() as poll:
            for one in (self._listener, self._awake):
                poll.register(one, selectors.EVENT_READ)
            while True:
                for key, _ in poll.select(HELLO_S):
                    if key.fileobj is self._awake:
                        self._close_all()
                        return
                    if key.fileobj is self._listener:
                        self._accept(poll)
                    elif not self._read(self._senders[key.fd]):
                        self._drop(poll, key.fd)
                for number in self._late():
                    self._drop(poll, number)

    def _accept(self, poll: selectors.BaseSelector) -> None:
        """Accepts a connection of the same user, if not too many wait for their Hello."""
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            get().warning("LOCAL_ROWS_REFUSED", error=str(error))
            return
        connection.setblocking(False)
        if peer(connection)[1] != own_user():
            get().warning("LOCAL_ROWS_REFUSED", error="it runs as another user")
            connection.close()
        elif sum(sender.ring is None for sender in self._senders.values()) >= MAX_STRANGERS:
            connection.close()
        else:
            self._senders[connection.fileno()] = _Sender(connection, time.monotonic())
            poll.register(connection, selectors.EVENT_READ)

    def _late(self) -> list[int]:
        """File descriptors of connections whose Hello is overdue."""
        deadline = time.monotonic() - HELLO_S
        return [number for number, sender in self._senders.items() if sender.ring is None and sender.since < deadline]

    def _drop(self, poll: selectors.BaseSelector, number: int) -> None:
        sender = self._senders.pop(number)
        poll.unregister(sender.socket)
        sender.close()

    def _read(self, sender: _Sender) -> bool:
        """Reads what a sender has sent. False if its connection must be closed."""
        try:
            if sender.ring is None:
                return self._let_in(sender)
            for _ in range(_TURN):
                try:
                    packet = sender.socket.recv(MAX_PACKET)
                except ConnectionResetError:
                    continue  # it closed without reading all counts; what it sent before is still there
                if not packet:
                    return False
                self._take(sender, sender.ring, packet)
        except BlockingIOError:
            return True
        except (WireError, OSError, RedisTrouble) as error:
            get().error("LOCAL_ROWS_REFUSED", worker=sender.worker, error=str(error))
            return False
        return True

    def _let_in(self, sender: _Sender) -> bool:
        """Reads the Hello and maps the ring. Raises WireError for a wrong secret or a bad ring."""
        packet, rings = receive_with(sender.socket, MAX_PACKET)
        try:
            hello = Hello.decode(packet)
            if not hmac.compare_digest(hello.secret.encode(), self.address.secret.encode()) or len(rings) != 1:
                raise WireError("it does not know the secret, or has no ring")
            sender.worker, sender.ring = hello.worker_id, map_ring(rings[0])
        finally:
            for ring in rings:
                os.close(ring)
        sender.socket.send(WELCOME)
        return True

    def _take(self, sender: _Sender, ring: mmap.mmap, packet: bytes) -> None:
        """Copies a message out of the ring, delivers it, and tells the sender the new count. Raises WireError."""
        described = read_descriptor(packet, len(ring))
        fields = {name.encode(): ring[begin:end] for name, begin, end in described}
        if event := decode_entry(fields, time.monotonic_ns()):
            self._mailbox.put(event)
        reach("worker.after_receive")
        sender.copied += 1
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has left; what it sent is still there
            # A sender has at most MAX_UNREAD messages unread, so this finds room; if not, it is not our sender.
            sender.socket.send(tell_count(sender.copied))

    def _close_all(self) -> None:
        for one in (self._listener, self._awake, self._waker, *self._senders.values()):
            one.close()

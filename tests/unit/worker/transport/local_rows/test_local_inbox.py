"""The local inbox accepts senders that know its secret, and drops those that send something malformed."""

import os
import socket
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from blockrelay.protocol.encoding.forward_segment import ForwardSegment
from blockrelay.protocol.messages import Forward, NextJob
from blockrelay_worker.policy import MAX_STRANGERS
from blockrelay_worker.transport.events import Event
from blockrelay_worker.transport.local_rows import inbox as inbox_module
from blockrelay_worker.transport.local_rows.frames import Address, Hello, describe
from blockrelay_worker.transport.local_rows.inbox import LocalInbox
from blockrelay_worker.transport.local_rows.link import LinkLost, LocalLink
from blockrelay_worker.transport.local_rows.ring import new_ring
from blockrelay_worker.transport.local_rows.system import HAS_LOCAL_ROWS, packet_socket
from blockrelay_worker.transport.mailbox import Mailbox
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not HAS_LOCAL_ROWS, reason="rows go through Redis there")
ROOT = pytest.mark.skipif(HAS_LOCAL_ROWS and os.geteuid() != 0, reason="only root can become somebody else")
NOBODY = 65534
RING = 1 << 16
JOB = {"next_job": NextJob(request_id="q", run_id="r", position=0, tokens=(5,)).encode()}


@pytest.fixture
def mailbox() -> Mailbox[Event]:
    return Mailbox[Event]()


@pytest.fixture
def inbox(mailbox: Mailbox[Event]) -> Iterator[LocalInbox]:
    listening = LocalInbox(mailbox)
    listening.start()
    yield listening
    listening.close()


def connect(inbox: LocalInbox) -> LocalLink:
    return LocalLink(inbox.address, worker_id="a", ring_bytes=RING)


def raw(inbox: LocalInbox) -> socket.socket:
    connection = packet_socket()
    connection.settimeout(5)
    connection.connect(inbox.address.socket_name)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Waits for it."""
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


def test_messages_arrive_as_they_were_sent(inbox: LocalInbox, mailbox: Mailbox[Event]) -> None:
    segment = ForwardSegment(request_id="q", run_id="r", sequence=0, position=0, token_ids=(7, 8), ends_known=True)
    rows = np.array([[np.nextafter(np.float32(1), np.float32(2)), -0.0], [1e-45, 3.4e38]], np.float32)
    message = Forward(sender="a", segments=(segment,), rows=rows)
    link = connect(inbox)
    assert link.send(message.encode(), 1.0) and link.send(JOB, 1.0)
    events = mailbox.take(5.0)
    wait_until(lambda: events.extend(mailbox.take(0.0)) or len(events) == 2, "both arrive")
    forward, job = events
    assert isinstance(forward, Forward) and forward.rows is not None and forward.rows.tobytes() == rows.tobytes()
    assert (forward.sender, forward.segments) == ("a", (segment,)) and forward.received_ns > 0
    assert job == NextJob(request_id="q", run_id="r", position=0, tokens=(5,))
    link.close()


@pytest.mark.parametrize(
    "hello",
    [
        lambda ring: (Hello("a", "0" * 32).encode(), [ring]),
        lambda ring: (b"", [ring]),
        lambda ring: (b"\x80\x04N.", [ring]),
        lambda ring: ("secret", []),
        lambda ring: ("secret", [0]),
        lambda ring: ("secret", "unsealed"),
    ],
    ids=["wrong secret", "nothing", "pickle", "no ring", "no memory", "could be cut off"],
)  # fmt: skip
def test_who_does_not_say_hello_as_it_should_is_not_let_in(
    inbox: LocalInbox, mailbox: Mailbox[Event], hello: Callable[[int], tuple[bytes | str, list[int] | str]]
) -> None:
    ring, memory = new_ring(RING)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, RING)
    packet, descriptors = hello(ring)
    with raw(inbox) as connection:
        greeting = Hello("a", inbox.address.secret).encode() if isinstance(packet, str) else packet
        given = [unsealed] if isinstance(descriptors, str) else descriptors
        socket.send_fds(connection, [greeting or b" "], given)
        assert is_closed(connection)
    os.close(ring)
    os.close(unsealed)
    memory.close()
    link = connect(inbox)
    assert link.send(JOB, 1.0) and mailbox.take(5.0), "others are let in as before"
    link.close()


@pytest.mark.parametrize(
    "packet",
    [
        b"x",
        b"x" * 500,
        struct.pack("<BQQQ", 9, 0, 1, 0),
        struct.pack("<BQQQ", 2, RING - 3, 4, 0),
        struct.pack("<BQQQ", 2, 2**64 - 1, 1, 0),
        struct.pack("<BQQQ", 1, 0, 2**64 - 1, 2),
        struct.pack("<BQQQ", 2, 0, 4, 4),
    ],
)
def test_a_packet_that_is_no_descriptor_ends_the_connection(
    inbox: LocalInbox, mailbox: Mailbox[Event], packet: bytes
) -> None:
    link = connect(inbox)
    link._socket.send(packet)  # pyright: ignore[reportPrivateUsage]

    def lost() -> bool:
        try:
            link.look()
        except LinkLost:
            return True
        return False

    wait_until(lost, "the connection is closed")
    link.close()
    assert not mailbox.take(0.0)


@pytest.mark.parametrize("fields", [{"next_job": b"\x80\x04N."}, {"head": b"\x81\xa1v\x01", "rows": b"1234"}])
def test_a_message_that_does_not_decode_is_dropped_as_an_entry_of_redis_is(
    inbox: LocalInbox, mailbox: Mailbox[Event], fields: dict[str, bytes]
) -> None:
    link = connect(inbox)
    assert link.send(fields, 1.0) and link.send(JOB, 1.0)
    assert [type(event) for event in mailbox.take(5.0)] == [NextJob], "the one behind it"
    link.close()


def test_what_its_sender_writes_over_it_later_changes_nothing(inbox: LocalInbox, mailbox: Mailbox[Event]) -> None:
    link = connect(inbox)
    assert link.send(JOB, 1.0)
    (event,) = mailbox.take(5.0)
    link._ring[:] = bytes(RING)  # pyright: ignore[reportPrivateUsage]
    assert event == NextJob(request_id="q", run_id="r", position=0, tokens=(5,))
    link.close()


def test_strangers_who_say_nothing_take_no_room(inbox: LocalInbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_module, "HELLO_S", 0.05)
    silent = [raw(inbox) for _ in range(MAX_STRANGERS)]
    with raw(inbox) as last:
        assert is_closed(last)
    for connection in silent:
        assert is_closed(connection), "after a while"
        connection.close()
    connect(inbox).close()


def test_a_worker_that_leaves_is_seen_at_once_and_cannot_be_found_again(mailbox: Mailbox[Event]) -> None:
    inbox = LocalInbox(mailbox)
    inbox.start()
    link = connect(inbox)
    inbox.close()
    with pytest.raises(LinkLost):
        link.send(JOB, 5.0)
    with pytest.raises(ConnectionRefusedError):
        connect(inbox)
    link.close()


@contextmanager
def as_nobody(do: Callable[[], None]) -> Iterator[int]:
    """A process of another user that does something and lives until we are through with it."""
    told, tell = os.pipe()
    hold, let_go = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: threads of ours are not in the child
        child = os.fork()
    if child == 0:
        try:
            os.close(let_go)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            do()
            os.write(tell, b"y")
            os.read(hold, 1)
        finally:
            os._exit(0)
    os.close(tell)
    try:
        yield told
    finally:
        os.close(let_go)
        os.waitpid(child, 0)
        os.close(told)
        os.close(hold)


@ROOT
def test_another_user_is_refused_even_with_the_secret(inbox: LocalInbox, mailbox: Mailbox[Event]) -> None:
    def intrude() -> None:
        try:
            connect(inbox)
        except (OSError, LinkLost):
            return
        os._exit(1)

    with as_nobody(intrude) as told:
        assert os.read(told, 1) == b"y", "it was not let in"
    assert not mailbox.take(0.0)


@ROOT
def test_another_user_who_listens_in_a_workers_place_does_not_learn_the_secret() -> None:
    address = Address.new()
    heard = os.pipe()

    def listen() -> None:
        place = packet_socket()
        place.bind(address.socket_name)
        place.listen(1)

        def serve() -> None:
            connection, _ = place.accept()
            os.write(heard[1], connection.recv(1000) or b"nothing")

        threading.Thread(target=serve, daemon=True).start()

    with as_nobody(listen) as told:
        assert os.read(told, 1) == b"y"
        with pytest.raises(LinkLost, match="another user"):
            LocalLink(address, worker_id="a", ring_bytes=RING)
        assert os.read(heard[0], 100) == b"nothing"
    for end in heard:
        os.close(end)


def test_a_descriptor_names_the_fields_it_was_made_of() -> None:
    assert describe(JOB, 16) == struct.pack("<BQQQ", 2, 16, len(JOB["next_job"]), 0)

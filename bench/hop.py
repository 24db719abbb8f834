"""Measures how long hidden states take from one process to the next on one host, by the worker's own transport."""

import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np

from blockrelay.protocol.messages import Forward, ForwardSegment
from blockrelay_worker.transport.events import Event
from blockrelay_worker.transport.local_rows.frames import Address
from blockrelay_worker.transport.local_rows.inbox import LocalInbox
from blockrelay_worker.transport.local_rows.link import LocalLink
from blockrelay_worker.transport.mailbox import Mailbox

RING_BYTES = 1 << 24
WARM_UP, RUNS = 50, 400
PATIENCE_S = 10.0


def one_way_s(hidden: int, rows: int = 1, *, runs: int = RUNS) -> float:
    """Returns the median seconds of a message of `rows` rows with `hidden` values each, half of a round trip.

    A message is encoded, goes through shared memory, wakes the other process, and is decoded there.
    """
    ours, theirs = multiprocessing.Pipe()
    echo = multiprocessing.get_context("spawn").Process(target=_echo, args=(theirs,), daemon=True)
    mailbox = Mailbox[Event]()
    inbox = LocalInbox(mailbox)
    inbox.start()
    echo.start()
    try:
        ours.send(inbox.address)
        link = LocalLink(_address(ours), worker_id="there", ring_bytes=RING_BYTES)
        segment = ForwardSegment(
            request_id="r", run_id="r", sequence=0, position=0, token_ids=(0,) * rows, ends_known=True
        )
        message = Forward(sender="there", segments=(segment,), rows=np.zeros((rows, hidden), np.float32))
        times: list[float] = []
        for _ in range(WARM_UP + runs):
            began = time.perf_counter()
            link.send(message.encode(), PATIENCE_S)
            mailbox.get(timeout=PATIENCE_S)
            times.append((time.perf_counter() - began) / 2)
        link.close()
        return statistics.median(times[WARM_UP:])
    finally:
        echo.kill()
        echo.join()
        inbox.close()


def _echo(pipe: Connection) -> None:
    """Sends every message back, in the other process."""
    mailbox = Mailbox[Event]()
    inbox = LocalInbox(mailbox)
    inbox.start()
    pipe.send(inbox.address)
    link = LocalLink(_address(pipe), worker_id="back", ring_bytes=RING_BYTES)
    while True:
        event = mailbox.get()
        assert isinstance(event, Forward)
        link.send(event.encode(), PATIENCE_S)


def _address(pipe: Connection) -> Address:
    address = pipe.recv()
    assert isinstance(address, Address)
    return address

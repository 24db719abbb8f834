"""One contract for both ways of rows, through the payload Redis and through shared memory: what arrives is what was
sent, in its order, and a target that takes nothing is not waited for."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import redis
from prometheus_client import CollectorRegistry

from blockrelay import failpoints
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.encoding.forward_segment import ForwardSegment
from blockrelay.protocol.encoding.named_tensors import NamedTensors
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import Commit, Forward, NextJob
from blockrelay_worker.policy import FULL_INBOX_MESSAGES
from blockrelay_worker.transport import stage_sender
from blockrelay_worker.transport.events import Event
from blockrelay_worker.transport.inbox_reader import Reader
from blockrelay_worker.transport.local_rows.deaths import Deaths
from blockrelay_worker.transport.local_rows.inbox import LocalInbox
from blockrelay_worker.transport.local_rows.links import LocalLinks
from blockrelay_worker.transport.local_rows.system import HAS_LOCAL_ROWS
from blockrelay_worker.transport.mailbox import Mailbox
from blockrelay_worker.transport.redis_links import Links
from blockrelay_worker.transport.stage_sender import StageSender
from tests.support.cell import Cell
from tests.support.waiting import wait_until
from tests.support.worker.links import links_of

TARGET, HIDDEN, RING = "target", 16, 1 << 14

needs_local_rows = pytest.mark.skipif(not HAS_LOCAL_ROWS, reason="all rows go through Redis there")


class Sink(Mailbox[Event]):
    """Takes events while `open`; whoever brings one otherwise waits."""

    def __init__(self) -> None:
        self.events, self.open = list[Event](), threading.Event()

    def put(self, item: Event, block: bool = True, timeout: float | None = None) -> None:
        assert self.open.wait(30)
        self.events.append(item)


@dataclass
class Way:
    """`leave`: the target's life ends."""

    name: str
    sender: StageSender
    sink: Sink
    metrics: WorkerMetrics
    leave: "threading.Event"

    def sent_bytes(self, way: str) -> float:
        return self.metrics.registry.get_sample_value("blockrelay_worker_forwarded_bytes_total", {"way": way}) or 0.0


@contextmanager
def redis_inbox(client: redis.Redis, keys: Keys, links: Links, sink: Sink) -> Iterator[None]:
    client.xadd(keys.inbox(TARGET), {"hello": TARGET})
    over = threading.Event()
    reader = Reader(client, keys.inbox(TARGET), [], sink, over, links.watch)
    reader.start()
    wait_until(lambda: not client.xlen(keys.inbox(TARGET)), "it has read what created its inbox")
    yield
    sink.open.set()
    over.set()
    client.xadd(keys.inbox(TARGET), {"wake": ""}, nomkstream=True)
    client.delete(keys.inbox(TARGET))
    reader.join()
    client.delete(keys.inbox(TARGET))


@contextmanager
def local_inbox(client: redis.Redis, keys: Keys, sink: Sink) -> Iterator[None]:
    inbox = LocalInbox(sink)
    inbox.start()
    client.hset(keys.worker(TARGET), "local_rows", inbox.address.to_record())
    yield
    sink.open.set()
    client.delete(keys.worker(TARGET))
    inbox.close()


@pytest.fixture(params=["redis", pytest.param("local", marks=needs_local_rows)])
def way(request: pytest.FixtureRequest, cell: Cell) -> Iterator[Way]:
    metrics, stop, sink, leave = WorkerMetrics(CollectorRegistry()), threading.Event(), Sink(), threading.Event()
    links, client, keys = links_of(cell, metrics=metrics, stop=stop), cell.client, cell.keys
    deaths = Deaths(links)
    local = LocalLinks("sender", RING, links.read_worker, deaths)
    inbox = redis_inbox(client, keys, links, sink) if request.param == "redis" else local_inbox(client, keys, sink)
    there = threading.Event()

    def live() -> None:
        with inbox:
            there.set()
            leave.wait()

    life = threading.Thread(target=live)
    life.start()
    assert there.wait(30), "the target is not there"
    made = Way(request.param, StageSender(links, metrics, local), sink, metrics, leave)
    yield made
    leave.set()
    life.join()
    local.close()


@pytest.fixture
def trap() -> Iterator[Callable[[str], None]]:
    yield lambda setting: failpoints.arm("worker", setting)
    failpoints.arm("worker", "")


def forward(sequence: int, rows: int = 1) -> Forward:
    segment = ForwardSegment(
        request_id="q", run_id="r", sequence=sequence, position=sequence, token_ids=(7,) * rows, ends_known=True
    )
    random = np.random.default_rng(sequence)
    return Forward(sender="sender", segments=(segment,), rows=random.random((rows, HIDDEN), np.float32))


def commit(position: int) -> Commit:
    return Commit(request_id="q", run_id="r", position=position, tokens=(position,))


def named(sequence: int, rows: int = 1) -> Forward:
    """As `forward`, with tensors by name: the mask has another length at each position."""
    (segment,) = forward(sequence, rows).segments
    mask = np.ones((1, 1, rows, sequence + rows), np.bool_)
    hidden = np.random.default_rng(sequence).random((1, rows, HIDDEN)).astype(np.float16)
    part = NamedTensors(rows=rows, arrays={"mask": mask, "hidden": hidden})
    return Forward(sender="sender", segments=(segment,), tensors=[[part]])


def content(message: Forward) -> list[bytes]:
    """What was computed, bit by bit."""
    if message.rows is not None:
        return [message.rows.tobytes()]
    arrays = [item for parts in message.tensors for part in parts for item in part.arrays.items()]
    return [repr((name, array.dtype, array.shape)).encode() + array.tobytes() for name, array in arrays]


def same(event: Event, sent: Forward) -> bool:
    return isinstance(event, Forward) and event.segments == sent.segments and content(event) == content(sent)


def size(message: Forward) -> int:
    return sum(len(value) for name, value in message.encode().items() if name != "head")


def rows_in(sink: Sink) -> list[Forward]:
    return [event for event in sink.events if isinstance(event, Forward)]


@pytest.mark.parametrize("made", [forward, named])
def test_rows_arrive_once_bit_by_bit_and_in_order(way: Way, made: Callable[..., Forward]) -> None:
    way.sink.open.set()
    sent = [made(sequence, rows=1 + sequence % 50) for sequence in range(200)]
    for message in sent:
        assert way.sender.forward(TARGET, message)
    wait_until(lambda: len(way.sink.events) == len(sent), "all arrive")
    assert all(map(same, way.sink.events, sent))
    other = "local" if way.name == "redis" else "redis"
    assert way.sent_bytes(way.name) == sum(map(size, sent)) and not way.sent_bytes(other)


def test_a_target_that_takes_nothing_is_full_and_then_not(way: Way) -> None:
    sent = [forward(sequence) for sequence in range(FULL_INBOX_MESSAGES + 1)]
    for message in sent[:-2]:
        assert way.sender.forward(TARGET, message)
    assert way.sender.full_targets() == frozenset()
    for message in sent[-2:]:
        assert way.sender.forward(TARGET, message), "rows of tokens still go"
    assert way.sender.full_targets() == {TARGET}
    way.sink.open.set()
    wait_until(lambda: not way.sender.full_targets(), "it has taken them")
    wait_until(lambda: len(way.sink.events) == len(sent), "all arrive")
    assert all(map(same, way.sink.events, sent))


def test_a_target_that_has_left_gets_nothing_and_the_sender_knows_at_once(way: Way, client: redis.Redis) -> None:
    way.sink.open.set()
    assert way.sender.forward(TARGET, forward(0))
    wait_until(lambda: way.sink.events, "it has arrived")
    way.leave.set()
    wait_until(lambda: not client.exists(Keys("t").inbox(TARGET), Keys("t").worker(TARGET)), "it has left")
    wait_until(lambda: not way.sender.forward(TARGET, forward(1)), "it is known")
    assert not way.sender.forward(TARGET, forward(2)) and not way.sender.forward(TARGET, forward(3))


def test_what_a_failure_around_sending_says_is_believed(way: Way, trap: Callable[[str], None]) -> None:
    way.sink.open.set()
    assert way.sender.forward(TARGET, forward(0))
    trap("worker.before_forward:raise")
    assert not way.sender.forward(TARGET, forward(1)), "not sent"
    assert way.sender.forward(TARGET, forward(2))
    wait_until(lambda: len(way.sink.events) == 2, "both arrive")
    assert [event.segments[0].sequence for event in rows_in(way.sink)] == [0, 2]


@needs_local_rows
@pytest.mark.parametrize("way", ["local"], indirect=True)
class TestShared:
    """What only shared memory has: an end."""

    def test_rows_without_room_are_given_up_and_those_before_arrive(
        self, way: Way, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stage_sender, "ROWS_WAIT_S", 0.01)
        sent = list[Forward]()
        while way.sender.forward(TARGET, message := forward(len(sent), rows=8)):
            sent.append(message)
        assert sum(map(size, sent)) <= RING < 2 * sum(map(size, sent))
        monkeypatch.setattr(stage_sender, "ROWS_WAIT_S", 3600.0)
        assert not way.sender.forward(TARGET, message), "who has taken nothing since is not waited for again"
        way.sender.announce([(TARGET, commit(0))])  # a hint: nobody waits for it
        way.sink.open.set()
        wait_until(lambda: not way.sender.full_targets(), "it has taken them")
        assert way.sender.forward(TARGET, message)
        wait_until(lambda: len(rows_in(way.sink)) == len(sent) + 1, "all arrive")
        assert all(map(same, rows_in(way.sink), [*sent, message]))

    def test_tokens_are_told_without_a_payload_redis(self, way: Way) -> None:
        way.sink.open.set()
        way.sender.announce([(TARGET, commit(3))])
        wait_until(lambda: way.sink.events, "it arrives")
        assert way.sink.events == [NextJob(request_id="q", run_id="r", position=3, tokens=(3,))]

    @pytest.mark.parametrize("made", [forward, named])
    def test_a_message_larger_than_the_ring_goes_through_redis(
        self, way: Way, client: redis.Redis, keys: Keys, made: Callable[..., Forward]
    ) -> None:
        way.sink.open.set()
        client.xadd(keys.inbox(TARGET), {"hello": TARGET})
        assert way.sender.forward(TARGET, made(0))
        assert way.sender.forward(TARGET, made(1, rows=RING // HIDDEN // 4))
        assert way.sender.forward(TARGET, made(2)), "and so does what comes behind it"
        assert client.xlen(keys.inbox(TARGET)) == 3
        client.delete(keys.inbox(TARGET))

    def test_a_receiver_that_fails_is_reached_again_over_a_new_connection(
        self, way: Way, trap: Callable[[str], None]
    ) -> None:
        way.sink.open.set()
        assert way.sender.forward(TARGET, forward(0))
        wait_until(lambda: way.sink.events, "it arrives")
        trap("worker.after_receive:raise")
        told = way.sender.forward(TARGET, forward(1))
        wait_until(lambda: len(way.sink.events) == 2, "it arrives, and the receiver fails behind it")
        wait_until(lambda: not told or not way.sender.forward(TARGET, forward(2)), "the connection is lost")
        wait_until(lambda: way.sender.forward(TARGET, forward(3)), "there is another")
        assert way.sent_bytes("redis") == 0

"""The reader of an inbox, against a real Redis."""

import threading
from collections.abc import Iterator

import pytest
import redis
from prometheus_client import Counter

from blockrelay import failpoints
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import NextJob
from blockrelay.redis.errors import RedisWatch
from blockrelay_worker.transport.events import Event, Wake
from blockrelay_worker.transport.inbox_reader import Reader
from blockrelay_worker.transport.mailbox import Mailbox
from tests.support.waiting import wait_until

JOB = NextJob(request_id="req-1", run_id="r", position=0, tokens=(5,))


@pytest.fixture
def reading(client: redis.Redis, keys: Keys) -> Iterator[tuple[Mailbox[Event], Reader]]:
    """A reader of `inbox:w` and a stream of re-runs, and where it delivers to."""
    mailbox, over = Mailbox[Event](), threading.Event()
    reader = Reader(
        client,
        keys.inbox("w"),
        [keys.reruns("m", "cpu")],
        mailbox,
        over,
        RedisWatch(Counter("errors", "", registry=None)),
    )
    reader.start()
    yield mailbox, reader
    over.set()
    reader.join()


def test_a_job_that_is_gone_before_anybody_reads_it_is_only_a_wake_up(
    client: redis.Redis, keys: Keys, reading: tuple[Mailbox[Event], Reader]
) -> None:
    """CLAIM queues a re-run that is due and claims it at once: the stream of a blocked reader grew by nothing."""
    mailbox, reader = reading
    there_and_gone = "redis.call('XDEL', KEYS[1], redis.call('XADD', KEYS[1], '*', 'r', 'req-1'))"
    wait_until(lambda: client.info("clients")["blocked_clients"] > 0, "the reader waits")  # pyright: ignore
    for _ in range(3):
        client.eval(there_and_gone, 1, keys.reruns("m", "cpu"))
    client.xadd(keys.inbox("w"), {"next_job": JOB.encode()})
    client.expire(keys.inbox("w"), 60)
    events: list[Event] = []

    def arrived() -> bool:
        events.extend(mailbox.take(0.0))
        return JOB in events

    wait_until(arrived, "the next entry is delivered", timeout_s=5)
    assert reader.is_alive() and set(map(type, events)) <= {NextJob, Wake}


@pytest.fixture
def deletion_lost() -> Iterator[None]:
    """The first command that deletes what was read is lost."""
    failpoints.arm("worker", "worker.after_receive:raise")
    yield
    failpoints.arm("worker", "")


@pytest.mark.usefixtures("deletion_lost")
def test_an_entry_whose_deletion_was_lost_does_not_fill_the_inbox_for_ever(
    client: redis.Redis, keys: Keys, reading: tuple[Mailbox[Event], Reader]
) -> None:
    """Senders stop at a full inbox, so that no later entry may be needed to make room."""
    mailbox, _ = reading
    client.xadd(keys.inbox("w"), {"next_job": JOB.encode()})
    wait_until(lambda: client.xlen(keys.inbox("w")) == 0, "it is gone", timeout_s=5)
    assert [event for event in mailbox.take(0.0) if not isinstance(event, Wake)] == [JOB], "and was delivered once"

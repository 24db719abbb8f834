"""Measures the CPU that messages between two stages take at both ends, with the worker's own sender and reader."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from bench.simulate.measured.least_squares import least
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import Commit, Forward, ForwardSegment
from blockrelay.redis.client import Scripts, connect
from blockrelay.redis.errors import RedisWatch
from blockrelay_launcher.background import running_redis
from blockrelay_worker.transport.events import Event
from blockrelay_worker.transport.inbox_reader import Reader
from blockrelay_worker.transport.mailbox import Mailbox
from blockrelay_worker.transport.redis_links import Links
from blockrelay_worker.transport.stage_sender import StageSender

#: (rows, requests) of each message forwards, tokens of each message back, and repetitions.
FORWARDS, BACK, TIMES = ((1, 1), (4, 4), (16, 16), (64, 1), (256, 1)), (1, 4, 16), 200
_KEYS, _OTHER = Keys("c0"), "other"


@dataclass(frozen=True, slots=True)
class HopCosts:
    """Seconds of CPU of both ends together."""

    message: float
    """For each message."""
    row: float
    """For each row (hidden states of one token) in it."""
    part: float
    """For each request with rows in it."""
    job: float
    """For each token that is reported back to the first stage."""


def hop_costs(hidden: int) -> HopCosts:
    """Measures the costs of messages between stages, for hidden states of `hidden` values (float32)."""
    with running_redis(durable=False) as url:
        control, payload = connect(url), connect(url)
        watch = RedisWatch(WorkerMetrics(CollectorRegistry()).redis_errors)
        stop = threading.Event()
        links = Links(control, payload, _KEYS, Scripts(control, _KEYS), watch, stop)
        inbox = _KEYS.inbox(_OTHER)
        payload.xadd(inbox, {"opened": ""})
        mailbox = Mailbox[Event]()
        reader = Reader(connect(url), inbox, [], mailbox, stop, watch)
        reader.start()
        sender = StageSender(links, WorkerMetrics(CollectorRegistry()))
        did: list[tuple[float, ...]] = []
        seconds: list[float] = []

        def timed(send: Callable[[], object], events: int) -> float:
            began = time.thread_time() + _cpu_s(reader)
            for _ in range(TIMES):
                send()
                missing = events
                while missing:
                    missing -= len(mailbox.take(1.0))
            return (time.thread_time() + _cpu_s(reader) - began) / TIMES

        for rows, parts in FORWARDS:
            message = _forward(rows, parts, hidden)
            seconds.append(timed(lambda message=message: sender.forward(_OTHER, message), 1))
            did.append((1, rows, parts, 0))
        for tokens in BACK:
            commits = [_commit(number) for number in range(tokens)]
            seconds.append(timed(lambda commits=commits: sender.announce(commits), tokens))
            did.append((1, 0, 0, tokens))
        stop.set()
        payload.xadd(inbox, {"ends": ""})
        reader.join()
    return HopCosts(*least(did, seconds))


def _cpu_s(thread: threading.Thread) -> float:
    return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9


def _forward(rows: int, parts: int, hidden: int) -> Forward:
    """Returns a message with `rows` hidden states of `parts` requests."""
    tokens = (1,) * (rows // parts)
    segments = [
        ForwardSegment(
            request_id=f"req-{number:024d}",
            run_id="0" * 16,
            sequence=number,
            position=64,
            token_ids=tokens,
            ends_known=True,
        )
        for number in range(parts)
    ]
    return Forward(sender="worker", segments=tuple(segments), rows=np.zeros((rows, hidden), np.float32))


def _commit(number: int) -> tuple[str, Commit]:
    return _OTHER, Commit(request_id=f"req-{number:024d}", run_id="0" * 16, position=64, tokens=(1,))

"""What it takes to bring rows from one stage to the next: seconds of each message and of each byte in it.

Over Redis a message goes the way of `transport.stage_sender`: encoded, added to a stream, read by another process that
waits for it, decoded. In shared memory it is written and read once. Both are fitted as a straight line over sizes.
"""

import mmap
import multiprocessing
import time
from collections.abc import Callable, Sequence

import numpy as np

from blockrelay.planning.profile import Hop
from blockrelay.protocol.encoding.forward_segment import ForwardSegment
from blockrelay.protocol.messages import Forward
from blockrelay.redis.client import OneConnection, connect
from blockrelay_worker.offline.profiling.samples import Samples

ROWS = (1, 16, 64, 256)
RUNS = 40
#: Of a cell that nobody has.
_CELL, _THERE, _BACK = "profile", b"{profile}:there", b"{profile}:back"


def redis_hop(url: str, row_bytes: int) -> Hop:
    """Over the Redis at `url`, of rows of so many bytes. Raises RedisTrouble."""
    context = multiprocessing.get_context("spawn")
    echo = context.Process(target=_echo, args=(url,), daemon=True)
    echo.start()
    client = OneConnection(connect(url, cell=_CELL))
    try:
        client.ask("DEL", _THERE, _BACK)
        _there_and_back(client, row_bytes, 1)  # the other process is up
        return _line([(n * row_bytes, _samples(lambda n=n: _there_and_back(client, row_bytes, n))) for n in ROWS])
    finally:
        echo.kill()
        echo.join()
        client.ask("DEL", _THERE, _BACK)


def shared_memory_hop(row_bytes: int) -> Hop:
    """Rows of so many bytes, written by one side and read by the other, without what it takes to wake it."""
    times: list[tuple[int, Samples]] = []
    for rows in ROWS:
        size = rows * row_bytes
        content = np.random.default_rng(1).bytes(size)
        with mmap.mmap(-1, size) as shared:
            times.append((size, _samples(lambda s=shared, c=content: _write_and_read(s, c))))
    return _line(times)


def _write_and_read(shared: mmap.mmap, content: bytes) -> float:
    started = time.perf_counter()
    shared[:] = content
    np.frombuffer(bytes(shared), np.uint8)
    return time.perf_counter() - started


def _there_and_back(client: OneConnection, row_bytes: int, rows: int) -> float:
    """Seconds of one way."""
    content = np.zeros((rows, -(-row_bytes // 4)), np.float32)
    segment = ForwardSegment(request="req", run="run", sequence=0, position=0, token_ids=(0,) * rows, ends_known=True)
    started = time.perf_counter()
    message = Forward(sender="worker", segments=(segment,), rows=content).encode()
    client.ask("XADD", _THERE, "*", *(part for item in message.items() for part in item))
    _read(client, _BACK)
    return (time.perf_counter() - started) / 2


def _echo(url: str) -> None:
    """Send back what comes."""
    client = OneConnection(connect(url, cell=_CELL))
    while True:
        fields = _read(client, _THERE)
        message = Forward.decode(fields).encode()
        client.ask("XADD", _BACK, "*", *(part for item in message.items() for part in item))


def _read(client: OneConnection, stream: bytes) -> dict[bytes, bytes]:
    """The next message, taken out."""
    while True:
        found = client.ask("XREAD", "BLOCK", 1000, "COUNT", 1, "STREAMS", stream, "0")
        if found:
            [[_, [[entry, fields]]]] = found
            client.ask("XDEL", stream, entry)
            return dict(zip(fields[::2], fields[1::2], strict=True))


def _samples(run: Callable[[], float]) -> Samples:
    return Samples([run() for _ in range(RUNS)])


def _line(times: Sequence[tuple[int, Samples]]) -> Hop:
    """Through sizes and medians of seconds, by least squares; neither figure is below zero."""
    sizes, seconds = np.array([(size, samples.median) for size, samples in times], np.float64).T
    slope, start = np.polyfit(sizes, seconds, 1)
    slope = max(float(slope), 0.0)
    start = max(float(start), float(seconds.min() - slope * sizes[0]), 0.0)
    return Hop(seconds=start, seconds_per_byte=slope, spread=times[0][1].spread)

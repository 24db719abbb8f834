"""Measures hops of rows from one stage to the next: seconds per message, and per byte in it.

Over Redis a message is handled as by `transport.stage_sender`: encoded, added to a stream, read by another process that
waits for it, and decoded. In shared memory it is written and read once. The results are fitted by a straight line over
message sizes.
"""

import mmap
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from blockrelay.onnx_blocks.dimensions import StepSizes
from blockrelay.onnx_blocks.handed_on import handed_on, shapes_handed_on
from blockrelay.onnx_blocks.wiring import Wiring
from blockrelay.planning.profile import Hop
from blockrelay.protocol.encoding.forward_segment import ForwardSegment
from blockrelay.protocol.encoding.named_tensors import NamedTensors
from blockrelay.protocol.messages import Forward
from blockrelay.redis.client import OneConnection, connect
from blockrelay_worker.offline.profiling.samples import Samples

#: Numbers of rows of the messages that are measured, and how often each message is sent.
ROWS = (1, 16, 64, 256)
RUNS = 40
#: A cell name that no deployment uses, and the two streams of the measurement.
_CELL, _THERE, _BACK = "profile", b"{profile}:there", b"{profile}:back"


@dataclass(frozen=True, slots=True)
class HopRows:
    """The messages of a stage: `bytes` of one row, and a function that makes a `message` with n rows."""

    bytes: int
    message: Callable[[int], Forward]


def rows_of_ours(hidden: int) -> HopRows:
    """Messages between stages of our own blocks: float32 rows of `hidden` columns."""

    def made(rows: int) -> Forward:
        return Forward(sender="worker", segments=(_segment("req", rows),), rows=np.zeros((rows, hidden), np.float32))

    return HopRows(4 * hidden, made)


def rows_of_onnx_blocks(wiring: Wiring, last: int, context: int) -> HopRows:
    """Messages of a stage of ONNX blocks of other makers that ends with block `last` (from 1).

    Each row is of a request of its own and attends to `context` tokens (1 or more); it has the named tensors that later
    blocks take. `last` is not the model's last block. Raises OnnxBlocksError, with file and tensor, for tensors that
    cannot travel or whose shape is not known.
    """
    shapes = shapes_handed_on(wiring, last, StepSizes(batch=1, new=1, past=context - 1))
    arrays = {one.name: np.zeros(shapes[one.name], one.tensor.dtype) for one in handed_on(wiring, last)}

    def made(rows: int) -> Forward:
        segments = tuple(_segment(f"req-{at}", 1) for at in range(rows))
        return Forward(sender="worker", segments=segments, tensors=[(NamedTensors(rows=1, arrays=arrays),)] * rows)

    return HopRows(sum(array.nbytes for array in arrays.values()), made)


def _segment(request: str, rows: int) -> ForwardSegment:
    ids = (0,) * rows
    return ForwardSegment(request_id=request, run_id="run", sequence=0, position=0, token_ids=ids, ends_known=True)


def redis_hop(url: str, rows: HopRows) -> Hop:
    """Measures hops over the Redis at `url`, with a second process at the other end.

    Raises RedisTrouble, CommandError if Redis refuses a command, and UsageError for a URL that cannot be used. It uses
    and deletes two streams of its own there. It does not end if the second process fails: each message is waited for
    without a limit.
    """
    context = multiprocessing.get_context("spawn")
    echo = context.Process(target=_echo, args=(url,), daemon=True)
    echo.start()
    client = OneConnection(connect(url, cell=_CELL))
    try:
        client.ask("DEL", _THERE, _BACK)
        _there_and_back(client, rows.message(1))  # waits until the other process has started
        messages = [(n, rows.message(n)) for n in ROWS]
        return _line([(n * rows.bytes, _samples(lambda m=m: _there_and_back(client, m))) for n, m in messages])
    finally:
        echo.kill()
        echo.join()
        client.ask("DEL", _THERE, _BACK)


def shared_memory_hop(rows: HopRows) -> Hop:
    """Measures writing and reading the bytes of messages in shared memory, without waking another process.

    `rows.bytes` must be at least 1.
    """
    times: list[tuple[int, Samples]] = []
    for count in ROWS:
        size = count * rows.bytes
        content = np.random.default_rng(1).bytes(size)
        with mmap.mmap(-1, size) as shared:
            times.append((size, _samples(lambda s=shared, c=content: _write_and_read(s, c))))
    return _line(times)


def _write_and_read(shared: mmap.mmap, content: bytes) -> float:
    started = time.perf_counter()
    shared[:] = content
    np.frombuffer(bytes(shared), np.uint8)
    return time.perf_counter() - started


def _there_and_back(client: OneConnection, message: Forward) -> float:
    """Sends a message to the other process and back; returns half of the seconds that it took."""
    started = time.perf_counter()
    client.ask("XADD", _THERE, "*", *(part for item in message.encode().items() for part in item))
    _read(client, _BACK)
    return (time.perf_counter() - started) / 2


def _echo(url: str) -> None:
    """Sends each message back, for ever. Runs in a process of its own."""
    client = OneConnection(connect(url, cell=_CELL))
    while True:
        fields = _read(client, _THERE)
        message = Forward.decode(fields).encode()
        client.ask("XADD", _BACK, "*", *(part for item in message.items() for part in item))


def _read(client: OneConnection, stream: bytes) -> dict[bytes, bytes]:
    """Waits for the next message in a stream, deletes it there, and returns its fields."""
    while True:
        reply = client.ask("XREAD", "BLOCK", 1000, "COUNT", 1, "STREAMS", stream, "0")
        if reply:
            [[_, [[entry, fields]]]] = reply
            client.ask("XDEL", stream, entry)
            return dict(zip(fields[::2], fields[1::2], strict=True))


def _samples(run: Callable[[], float]) -> Samples:
    return Samples([run() for _ in range(RUNS)])


def _line(times: Sequence[tuple[int, Samples]]) -> Hop:
    """Fits a line through sizes (bytes) and median seconds by least squares; neither coefficient is below zero."""
    sizes, seconds = np.array([(size, samples.median) for size, samples in times], np.float64).T
    slope, start = np.polyfit(sizes, seconds, 1)
    slope = max(float(slope), 0.0)
    start = max(float(start), float(seconds.min() - slope * sizes[0]), 0.0)
    return Hop(seconds=start, seconds_per_byte=slope, spread=times[0][1].spread)

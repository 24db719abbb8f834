"""Reads all token logs that this gateway follows with one blocking read.

It is `XREAD BLOCK` over every followed `log:<id>` and a private wake stream, which interrupts the read when a new log
is to be followed. Positions live here, so a lost connection or a restarted Redis costs a pause, never an entry: the
read goes on behind the last position. A log that is shorter than the position here (Redis lost its tail) is not an
error: the same tokens will be committed again, and the read waits for what follows them.

Tokens of a nondeterministic device could not be committed again with the same values. So if gateways wait for replicas
of Redis (`BLOCKRELAY_ACCEPT_REPLICAS`), these tokens are passed on only when the replicas have them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import cast

from blockrelay.errors import RedisTrouble, WireError
from blockrelay.failpoints import reach
from blockrelay.observability import logs
from blockrelay.protocol.messages import EndEntry, LogEntry, decode_log_entry
from blockrelay.redis.client import BLOCK_MS, AsyncOneConnection, ReadReplicated, backoff_s
from blockrelay_gateway.policy import LOG_ENTRIES_A_READ, WAKE_TTL_S
from blockrelay_gateway.streaming.cell_links import CellLinks

Sink = Callable[[LogEntry], None]
#: An entry of a stream as Redis sends it: (id, [field, value, field, ...]).
_RawEntry = tuple[bytes, list[bytes]]


@dataclass(slots=True)
class _Tail:
    """One log that is followed: its request, its sink, and the position of the last entry that the sink got."""

    request_id: str
    sink: Sink
    position: int = 0


class Tailer:
    """Calls each sink with every entry of its log, in order, from position 1 to the end, exactly once.

    For an entry that cannot be read, the sink gets an end with the reason "error". It belongs to the event loop; `run`
    does the reading. A sink must not raise: that would end `run`.
    """

    def __init__(self, links: CellLinks) -> None:
        self._client, self._keys, self._metrics, self._watch = links.client, links.keys, links.metrics, links.watch
        self._replicated = links.replicated
        self._reading = AsyncOneConnection(links.client)
        self._wake_key = links.keys.wake(links.gateway)
        self._wake_id = "0-0"
        self._tails: dict[bytes, _Tail] = {}
        self._news = asyncio.Event()
        self._in_read = False
        #: The last read has worked, or has failed. Both are False before the first read.
        self.connected = self.away = False
        #: Set at each first read after the start or a lost connection. The waiting task clears it.
        self.returned = asyncio.Event()

    def subscribe(self, request_id: str, sink: Sink) -> None:
        """Starts to follow a log at position 1, also if it does not exist yet; ends behind its terminal entry.

        A second call for the same request replaces the sink and starts at position 1 again.
        """
        self._tails[self._keys.log(request_id).encode()] = _Tail(request_id, sink)
        if self._in_read:
            self._news.set()

    def unsubscribe(self, request_id: str) -> None:
        """Stops following a log; does nothing if it is not followed."""
        self._tails.pop(self._keys.log(request_id).encode(), None)

    async def run(self) -> None:
        """Reads until cancelled, also through failures of Redis."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read_for_ever(), name="tailer")
            tasks.create_task(self._wake_for_ever(), name="tailer-wake")

    async def _read_for_ever(self) -> None:
        attempt = 0
        while True:
            try:
                await self._read()
                self._watch.worked("read logs")
                if not self.connected:
                    self.connected, self.away = True, False
                    self.returned.set()
                    logs.get().info("REDIS_CONNECTED", cell=self._keys.cell, followed=len(self._tails))
                attempt = 0
            except RedisTrouble as error:
                self._watch.failed("read logs", error)
                self.connected, self.away = False, True
                self._wake_id = "0-0"  # a restarted Redis' clock may have gone back; an extra round is harmless
                await asyncio.sleep(backoff_s(attempt))
                attempt += 1

    async def _read(self) -> None:
        """Does one read and delivers its entries. Raises RedisTrouble."""
        positions = (f"{tail.position}-0" for tail in self._tails.values())
        streams = (self._wake_key, *self._tails, self._wake_id, *positions)
        # Until a read has worked, do not block: tasks that wait for `connected` should not wait for BLOCK_MS.
        block = ("BLOCK", BLOCK_MS) if self.connected else ()
        self._in_read = True
        reach("gateway.before_read")
        try:
            answer = await self._reading.ask("XREAD", "COUNT", LOG_ENTRIES_A_READ, *block, "STREAMS", *streams)
        finally:
            self._in_read = False
        reach("gateway.after_read")
        later: list[bytes] = []
        for key, entries in cast(list[tuple[bytes, list[_RawEntry]]], answer or []):
            if key == self._wake_key.encode():
                self._wake_id = entries[-1][0].decode()
            elif self._replicated and any(b"varies" in fields for _, fields in entries):
                later.append(key)
            else:
                self._deliver(key, entries)
        if later and self._replicated:
            await self._deliver_what_replicas_have(later, self._replicated)

    async def _deliver_what_replicas_have(self, logs_read: list[bytes], replicated: ReadReplicated) -> None:
        """Reads these logs once more and delivers what replicas have.

        Another server may be the master by now, without the entries that were read before.
        """
        reads = [
            ("XRANGE", key, f"({self._tails[key].position}-0", "+", "COUNT", LOG_ENTRIES_A_READ)
            for key in logs_read
            if key in self._tails
        ]
        for read, entries in zip(reads, await replicated(reads), strict=True):
            self._deliver(read[1], [(name, [*chain.from_iterable(fields.items())]) for name, fields in entries])

    def _deliver(self, key: bytes, entries: list[_RawEntry]) -> None:
        """Decodes entries of one log for its sink; an entry that cannot be read ends the request with an error."""
        tail = self._tails.get(key)
        if tail is None:
            return  # `unsubscribe` was called during the read
        for entry_id, fields in entries:
            try:
                named = dict(zip(fields[::2], fields[1::2], strict=True))
                decoded = decode_log_entry(entry_id, named, after=tail.position)
            except WireError as error:
                logs.get().error("LOG_ENTRY_UNREADABLE", request_id=tail.request_id, error=str(error))
                decoded = [EndEntry(tail.position + 1, "error", {"error": str(error), "code": "wire"}, (), "")]
            for entry in decoded:
                tail.position = entry.position
                ended = isinstance(entry, EndEntry)
                if ended:
                    self._tails.pop(key, None)
                tail.sink(entry)
                if ended:
                    return

    async def _wake_for_ever(self) -> None:
        """Interrupts the blocking read, with an entry in the wake stream, when `subscribe` has added a log."""
        while True:
            await self._news.wait()
            self._news.clear()
            pipeline = self._client.pipeline(transaction=False)
            pipeline.xadd(self._wake_key, {"w": ""}, maxlen=1, approximate=False)
            pipeline.expire(self._wake_key, WAKE_TTL_S)
            try:
                await pipeline.execute()
            except RedisTrouble:
                self._metrics.redis_errors.inc()  # the read ends by itself within BLOCK_MS

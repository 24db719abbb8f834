"""A thread that reads one inbox stream on Redis into events, and job streams as a wake-up."""

import threading
import time
from collections.abc import Mapping
from typing import Any, cast

import redis

from blockrelay.errors import RedisTrouble, WireError
from blockrelay.failpoints import reach
from blockrelay.observability.logs import get
from blockrelay.protocol.messages import Ended, Forward, NextJob
from blockrelay.redis.client import BLOCK_MS, backoff_s
from blockrelay.redis.errors import RedisWatch
from blockrelay_worker.transport.events import Event, Wake
from blockrelay_worker.transport.mailbox import Mailbox


class Reader(threading.Thread):
    """Reads one inbox (and, on the control Redis, the job streams as a wake-up) until `stop` is set.

    `inbox` and `job_streams` are keys of streams. With job streams, BLOCK_MS without an entry give a Wake too.
    RedisTrouble is logged by `watch`; the thread then tries again. An entry is deleted once it is in the mailbox: then
    the run table has its run, or the next BEAT finds that it has not. All entries before the position are deleted, also
    those of an earlier failed command: senders look at the inbox's length.
    """

    def __init__(
        self,
        client: redis.Redis,
        inbox: str,
        job_streams: list[str],
        mailbox: Mailbox[Event],
        stop: threading.Event,
        watch: RedisWatch,
    ) -> None:
        super().__init__(name=f"reader {inbox}", daemon=True)
        self._client, self._inbox, self._mailbox, self._stopped = client, inbox, mailbox, stop
        self._watch, self._work = watch, "read jobs" if job_streams else "read inbox"
        self._positions: dict[str, str] = {inbox: "0-0", **dict.fromkeys(job_streams, "0-0")}
        self._untrimmed = False  # read entries are still in the inbox

    def run(self) -> None:
        attempt = 0
        while not self._stopped.is_set():
            try:
                reply = self._client.xread(cast(Any, self._positions), count=64, block=BLOCK_MS)
                attempt = 0
                self._watch.worked(self._work)
            except RedisTrouble as error:
                self._watch.failed(self._work, error)
                self._stopped.wait(backoff_s(attempt))
                attempt += 1
                continue
            for raw_name, entries in cast(Any, reply) or []:
                if entries:  # Redis also wakes readers of what a script has added and deleted again
                    self._deliver(raw_name.decode(), entries)
            if self._untrimmed:
                self._trim()
            if len(self._positions) > 1 and not reply:
                self._mailbox.put(Wake())  # a job may wait for room or for a stage that came back without a message

    def _deliver(self, name: str, entries: list[tuple[bytes, Mapping[bytes, bytes]]]) -> None:
        """Puts entries of the inbox into the mailbox as events; a Wake for entries of a job stream."""
        self._positions[name] = entries[-1][0].decode()
        if name != self._inbox:
            self._mailbox.put(Wake())
            return
        received_ns = time.monotonic_ns()
        for _, fields in entries:
            if event := decode_entry(fields, received_ns):
                self._mailbox.put(event)
        self._untrimmed = True

    def _trim(self) -> None:
        """Deletes entries that were read. If Redis does not answer, the next round tries again."""
        milliseconds, number = self._positions[self._inbox].split("-")
        try:
            reach("worker.after_receive")
            self._client.xtrim(self._inbox, minid=f"{milliseconds}-{int(number) + 1}", approximate=False)
        except RedisTrouble:
            return
        self._untrimmed = False


def decode_entry(fields: Mapping[bytes, bytes], received_ns: int = 0) -> Event | None:
    """Decodes the event in an inbox entry. None for the entry that created the inbox, and for an unreadable one.

    An unreadable one is logged. `received_ns`: when it arrived, in nanoseconds of the monotonic clock.
    """
    try:
        if b"next_job" in fields:
            return NextJob.decode(fields[b"next_job"], received_ns)
        if b"ended" in fields:
            return Ended.decode(fields[b"ended"], again=fields.get(b"again") == b"1")
        if b"head" in fields:
            return Forward.decode(fields, received_ns)
    except WireError as error:
        get().error("INBOX_ENTRY_REFUSED", error=str(error))
    return None

"""Bringing a cell to our protocol, once the services of the older one have ended.

    1. wait until no worker and no gateway of the older protocol lives
    2. UPGRADE marks the cell: services of the older protocol do not start any more, those of ours wait
    3. UPGRADE changes every key, some at a time, each whole; a key that is changed is left as it is
    4. the number of the cell is ours

A scheduler that dies on the way is followed by one that begins again; several may do it at once. Requests under way
keep their tokens, queues and deadlines, and ended ones can still be read.
"""

import time
from collections.abc import Iterator
from itertools import islice
from typing import cast

from blockrelay.errors import RedisRefused
from blockrelay.observability import logs
from blockrelay.protocol.constants import DEAD_AFTER_MS
from blockrelay.protocol.number import PROTOCOL
from blockrelay.protocol.transitions import calls
from blockrelay.redis.cell_settings import read_cell_settings
from blockrelay.redis.protocol_check import read_spoken
from blockrelay_scheduler.link import Link

#: Keys that one call changes: some milliseconds in which Redis serves nobody else.
BATCH = 64


def upgrade_cell(link: Link) -> None:
    """Bring the cell to our protocol; nothing where it speaks ours, none or a later one.

    Raises RedisRefused while a service of the older protocol lives.
    """
    spoken = read_spoken(link.client, link.keys)
    if spoken is None or not spoken.is_older:
        return
    _refuse_while_others_live(link, str(spoken))
    if spoken.target is None:
        number = link.client.get(link.keys.protocol)
        link.scripts.run(calls.upgrade_begin(cast("bytes | None", number)))
        _refuse_while_others_live(link, str(spoken))  # somebody may have come in between
    started, changed = time.monotonic(), 0
    for names in _batches(link.client.scan_iter(link.keys.all, count=1000)):
        answer = link.scripts.run(calls.upgrade_keys(names))
        if answer is None:
            return  # another scheduler has finished
        changed += answer
    if link.scripts.run(calls.upgrade_finish()):
        seconds = round(time.monotonic() - started, 3)
        logs.get().info("CELL_UPGRADED", protocol=PROTOCOL, before=spoken.number, keys=changed, seconds=seconds)


def _batches(names: Iterator[bytes]) -> Iterator[list[bytes]]:
    while batch := list(islice(names, BATCH)):
        yield batch


def _refuse_while_others_live(link: Link, spoken: str) -> None:
    client, keys = link.client, link.keys
    cell = read_cell_settings(client, keys)
    dead_after_ms = cell.dead_after_ms if cell else DEAD_AFTER_MS
    seconds, micros = client.time()
    now_ms = seconds * 1000 + micros // 1000
    beats = cast("list[tuple[bytes, float]]", client.zrange(keys.workers, 0, -1, withscores=True))
    workers = [
        name.decode()
        for name, beat_ms in beats
        if abs(now_ms - beat_ms) < dead_after_ms and client.hget(keys.worker(name.decode()), "v") != b"%d" % PROTOCOL
    ]
    gateways = [
        name.decode()
        for name in cast("Iterator[bytes]", client.scan_iter(keys.gateway("*"), count=1000))
        if client.get(name) not in (b"%d" % PROTOCOL, None)
    ]
    if workers or gateways:
        raise RedisRefused(
            f"the cell {keys.cell!r} speaks {spoken}, and {len(workers)} workers and {len(gateways)} gateways of that "
            f"still live: stop all services of the older release, and the cell is brought to protocol {PROTOCOL}",
            code="PROTOCOL",
        )

"""Bringing a cell to our protocol.

From the number before ours: services of both releases work in the cell, and do what its number says. When every worker
and gateway there speaks ours, the number is raised, and nothing else changes; BLOCKRELAY_RAISE_PROTOCOL=false keeps the
way back open. A service of the older release that comes later refuses to start, and one that was not seen is refused by
every script.

From a still lower number, once the services of the older one have ended:

    1. wait until no worker and no gateway of the older protocol has shown itself for a while
    2. UPGRADE marks the cell: services of ours wait, and their scripts refuse
    3. UPGRADE changes every key, some at a time, each whole; a key that is changed is left as it is
    4. the number of the cell is ours

A scheduler that dies on the way is followed by one that begins again; several may do it at once. Requests under way
keep their tokens, queues and deadlines, and ended ones can still be read. What a gateway of an older protocol, which
had stood still meanwhile, accepts behind an upgrade is changed in the same way, as soon as it is seen.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

from blockrelay.errors import RedisRefused, UsageError
from blockrelay.observability import logs
from blockrelay.protocol.number import LOWEST_PROTOCOL, PROTOCOL
from blockrelay.protocol.transitions import calls
from blockrelay.redis.cell_settings import CellSettings, read_cell_settings
from blockrelay.redis.client import server_run_id
from blockrelay.redis.protocol_check import Spoken, check_protocol, read_spoken, services_below
from blockrelay_scheduler.link import Link
from blockrelay_scheduler.recovery import dead_workers

#: Keys that one call changes: some milliseconds in which Redis serves nobody else.
BATCH = 64
#: Seconds without a sign of life of an older service, watched without a break, after which there is none: beyond
#: `dead_after_s`, within which workers beat and gateways renew their keys many times once Redis answers.
MARGIN_S = 2.0
#: Seconds between two looks after which nobody has watched: Redis or this process stood still.
BREAK_S = 2.0
#: The numbers that we speak, as they stand in Redis.
_OURS = [b"%d" % number for number in range(LOWEST_PROTOCOL, PROTOCOL + 1)]
#: Seconds between two looks at who keeps the number from being raised: all keys are walked over.
RAISE_EVERY_S = 5.0


@dataclass(slots=True)
class CellUpgrade:
    """Upgrades the cell of `link`; one thread calls it again and again. `model` is the key of ours; `raises`: whether
    the number may be raised."""

    link: Link
    model: str
    raises: bool = True
    margin_s: float = MARGIN_S
    _quiet_since: float | None = field(default=None, init=False)
    _looked: float = field(default=float("-inf"), init=False)
    _server: str = field(default="", init=False)
    _raise_looked: float = field(default=float("-inf"), init=False)
    _kept_by: tuple[str, ...] | None = field(default=None, init=False)  # as last told

    def perform(self) -> None:
        """Bring the cell to a protocol of ours, our highest for a new one; nothing where it speaks a later one.

        Raises RedisRefused while a service of the older protocol lives, or may live, and UsageError for a number that
        is none.
        """
        spoken = read_spoken(self.link.client, self.link.keys)
        if spoken is None:
            check_protocol(self.link.client, self.link.keys, join=True)
            return
        if not spoken.is_older:
            return
        if spoken.number < LOWEST_PROTOCOL:
            self._refuse_while_others_live(spoken)
        self._change(spoken)

    def look(self) -> None:
        """Undo what brought the cell behind our protocols while services of ours run: its data is gone, an older copy
        of it was put back, or a gateway of an older release has accepted something. Raise its number to our highest
        when every service there speaks that. Raises RedisRefused as `perform`."""
        ask = self.link.client.pipeline(transaction=False)
        ask.get(self.link.keys.protocol)
        ask.exists(self.link.keys.load(self.model))
        found, older = ask.execute()
        if found not in _OURS:
            with suppress(UsageError):  # a number that is none: every script of ours refuses and says so
                self.perform()
        elif older:
            self._change(Spoken(int(found)))
        elif int(found) < PROTOCOL and self.raises:
            self._raise(int(found))

    def _raise(self, number: int) -> None:
        if time.monotonic() - self._raise_looked < RAISE_EVERY_S:
            return
        self._raise_looked = time.monotonic()
        workers, gateways = self._living(PROTOCOL)
        if kept_by := tuple(_named(workers, gateways)):
            if kept_by != self._kept_by:
                logs.get().info("PROTOCOL_KEPT", protocol=number, highest=PROTOCOL, by=", ".join(kept_by[:4]))
            self._kept_by = kept_by
        elif self.link.scripts.run(calls.raise_protocol(number)):
            logs.get().info("PROTOCOL_RAISED", protocol=PROTOCOL, before=number)

    def _change(self, spoken: Spoken) -> None:
        scripts = self.link.scripts
        target = spoken.target or (spoken.number if spoken.is_ours else PROTOCOL)
        if spoken.target is None:
            number = self.link.client.get(self.link.keys.protocol)
            scripts.run(calls.upgrade_begin(number if isinstance(number, bytes) else None, target))
        started, changed, more = time.monotonic(), 0, 1
        while more:
            server, more = server_run_id(self.link.client), 0
            for names in _batches(self.link.client.scan_iter(self.link.keys.all, count=1000)):
                answer = scripts.run(calls.upgrade_keys(names))
                if answer is None:
                    return  # another scheduler has finished
                more += answer
            changed += more
            if server_run_id(self.link.client) != server:
                more = 1  # the cursor of SCAN meant nothing to the server that came back
        if scripts.run(calls.upgrade_finish()):
            seconds = round(time.monotonic() - started, 3)
            logs.get().info("CELL_UPGRADED", protocol=target, before=spoken.number, keys=changed, seconds=seconds)

    def _refuse_while_others_live(self, spoken: Spoken) -> None:
        client, keys, now = self.link.client, self.link.keys, time.monotonic()
        workers, gateways = self._living(LOWEST_PROTOCOL)
        server = server_run_id(client)
        if workers or gateways or server != self._server or now - self._looked > BREAK_S:
            self._quiet_since = None
        self._server, self._looked = server, time.monotonic()
        says = f"the cell {keys.cell!r} speaks {spoken}"
        if workers or gateways:
            living = _named(workers, gateways)
            raise RedisRefused(
                f"{says}: stop all services of the older release, then it is upgraded; there still is "
                f"{', '.join(living[:4])}{' and more' if len(living) > 4 else ''} (a gateway is seen for 15 s)",
                code="PROTOCOL",
            )
        self._quiet_since = now if self._quiet_since is None else self._quiet_since
        if time.monotonic() - self._quiet_since < self.margin_s:
            raise RedisRefused(f"{says}: watching whether a service of the older release lives", code="PROTOCOL")

    def _living(self, number: int) -> tuple[list[str], list[str]]:
        """Workers with a beat that is not old, and gateways, that do not speak `number`."""
        client, keys = self.link.client, self.link.keys
        workers, gateways = services_below(client, keys, number)
        dead_after_ms = (read_cell_settings(client, keys) or CellSettings()).dead_after_ms
        seconds, micros = client.time()
        now_ms = seconds * 1000 + micros // 1000
        beats = {name: client.zscore(keys.workers, name) for name in workers}
        silent_ms = {name: now_ms - int(beat) for name, beat in beats.items() if beat is not None}
        dead = dead_workers(silent_ms, dead_after_ms=dead_after_ms)
        return [name for name in silent_ms if name not in dead], gateways


def _named(workers: list[str], gateways: list[str]) -> list[str]:
    return [*(f"worker {name}" for name in workers), *(f"gateway {name}" for name in gateways)]


def _batches(names: Iterator[bytes]) -> Iterator[list[bytes]]:
    while batch := list(islice(names, BATCH)):
        yield batch

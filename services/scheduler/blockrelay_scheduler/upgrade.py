"""The protocol number of the cell: written to a new cell, and raised when every service there speaks a higher one.

Services of two releases work side by side in a cell, and do what its number says. When every worker and gateway there
speaks the number of the newer release, its scheduler raises the cell's number. BLOCKRELAY_RAISE_PROTOCOL=false keeps
the number, and with it the way back. After the raise a service of the older release refuses to start, and every script
refuses one that was overlooked.
"""

import time
from contextlib import suppress
from dataclasses import dataclass, field

from blockrelay.errors import UsageError
from blockrelay.observability import logs
from blockrelay.protocol.number import PROTOCOL, is_spoken
from blockrelay.protocol.transitions import calls
from blockrelay.redis.cell_settings import CellSettings, read_cell_settings
from blockrelay.redis.protocol_check import check_protocol, parse_number, services_below
from blockrelay_scheduler.link import SchedulerLinks
from blockrelay_scheduler.policy import RAISE_EVERY_S
from blockrelay_scheduler.recovery import dead_workers


@dataclass(slots=True)
class CellUpgrade:
    """Keeps the protocol number of the cell of `link`, and raises it to `highest`. One thread calls it."""

    link: SchedulerLinks
    raises: bool = True
    """False: it never raises a number, and only writes one to a cell without."""
    highest: int = PROTOCOL
    _looked: float = field(default=float("-inf"), init=False)  # monotonic; see RAISE_EVERY_S
    _kept_by: tuple[str, ...] | None = field(default=None, init=False)  # the services last logged

    def look(self) -> None:
        """Writes PROTOCOL to a new cell, and raises a lower number to `highest` once every live service speaks that.

        It looks at the services every RAISE_EVERY_S seconds at most. It leaves a number that this release does not
        speak, and a cell that has requests but no number: every script refuses such a cell. Raises RedisTrouble.
        """
        client, keys = self.link.client, self.link.keys
        value = client.get(keys.protocol)
        with suppress(UsageError):  # the scripts of the same round raise it
            if value is None:
                check_protocol(client, keys, join=True)
                return
            number = parse_number(value, keys)
            if self.raises and is_spoken(number) and number < self.highest:
                self._raise(number)

    def _raise(self, number: int) -> None:
        """Raises the number to `highest` if every live service speaks it; looks every RAISE_EVERY_S at most."""
        if time.monotonic() - self._looked < RAISE_EVERY_S:
            return
        self._looked = time.monotonic()
        if kept_by := tuple(self._living_below()):
            if kept_by != self._kept_by:
                logs.get().info("PROTOCOL_KEPT", protocol=number, highest=self.highest, by=", ".join(kept_by[:4]))
            self._kept_by = kept_by
        elif self.link.scripts.run(calls.upgrade(number, self.highest)):
            logs.get().info("PROTOCOL_RAISED", protocol=self.highest, before=number)

    def _living_below(self) -> list[str]:
        """Returns the gateways and the live workers that do not speak `highest`, as `worker ID` or `gateway ID`."""
        client, keys = self.link.client, self.link.keys
        workers, gateways = services_below(client, keys, self.highest)
        dead_after_ms = (read_cell_settings(client, keys) or CellSettings()).dead_after_ms
        seconds, micros = client.time()
        now_ms = seconds * 1000 + micros // 1000
        heartbeats = {name: client.zscore(keys.workers, name) for name in workers}
        silent_ms = {name: now_ms - int(beat_ms) for name, beat_ms in heartbeats.items() if beat_ms is not None}
        dead = dead_workers(silent_ms, dead_after_ms=dead_after_ms)
        return [
            *(f"worker {name}" for name in silent_ms if name not in dead),
            *(f"gateway {name}" for name in gateways),
        ]

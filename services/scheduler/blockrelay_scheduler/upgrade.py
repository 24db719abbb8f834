"""The protocol number of the cell: written to a new cell, and raised when every service there speaks a higher one.

Services of two releases work side by side in a cell, and do what its number says. When every worker and gateway there
speaks the number of the newer release, its scheduler raises the cell's number, and nothing else changes;
BLOCKRELAY_RAISE_PROTOCOL=false keeps the way back open. A service of the older release that comes later refuses to
start, and a service that was not seen is refused by every script.
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
from blockrelay_scheduler.link import Link
from blockrelay_scheduler.policy import RAISE_EVERY_S
from blockrelay_scheduler.recovery import dead_workers


@dataclass(slots=True)
class CellUpgrade:
    """Upgrades the cell of `link` to the protocol `highest`; one thread calls it. `raises`: whether it may raise a
    number."""

    link: Link
    raises: bool = True
    highest: int = PROTOCOL
    _looked: float = field(default=float("-inf"), init=False)
    _kept_by: tuple[str, ...] | None = field(default=None, init=False)  # as last logged

    def look(self) -> None:
        """Give a cell whose data is gone its number again, and raise a lower number of ours when every service speaks
        the highest. Every script refuses a cell of another number, so nothing is done there."""
        client, keys = self.link.client, self.link.keys
        found = client.get(keys.protocol)
        with suppress(UsageError):  # scripts say it
            if found is None:
                check_protocol(client, keys, join=True)
                return
            number = parse_number(found, keys)
            if self.raises and is_spoken(number) and number < self.highest:
                self._raise(number)

    def _raise(self, number: int) -> None:
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
        """Workers with a beat that is not old, and gateways, that do not speak `highest`."""
        client, keys = self.link.client, self.link.keys
        workers, gateways = services_below(client, keys, self.highest)
        dead_after_ms = (read_cell_settings(client, keys) or CellSettings()).dead_after_ms
        seconds, micros = client.time()
        now_ms = seconds * 1000 + micros // 1000
        beats = {name: client.zscore(keys.workers, name) for name in workers}
        silent_ms = {name: now_ms - int(beat) for name, beat in beats.items() if beat is not None}
        dead = dead_workers(silent_ms, dead_after_ms=dead_after_ms)
        return [
            *(f"worker {name}" for name in silent_ms if name not in dead),
            *(f"gateway {name}" for name in gateways),
        ]

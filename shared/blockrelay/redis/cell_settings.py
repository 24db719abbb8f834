"""What all services of a cell must agree on, `{cell}:settings`: a scheduler puts its values there, others take them.

The scheduler that began last decides. Where none has begun yet, the defaults hold.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

import redis
import redis.asyncio

from blockrelay.observability import logs
from blockrelay.protocol.constants import DEAD_AFTER_MS, RETENTION_S
from blockrelay.protocol.keys import Keys
from blockrelay.settings import SchedulerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSettings:
    """How long a finished request can still be read, and the silence that makes a worker dead."""

    retention_s: int = RETENTION_S
    dead_after_ms: int = DEAD_AFTER_MS

    @classmethod
    def of(cls, settings: SchedulerSettings) -> "CellSettings":
        """Those that a scheduler was started with."""
        return cls(retention_s=settings.retention_s, dead_after_ms=int(1000 * settings.dead_after_s))

    @classmethod
    def from_redis(cls, found: Mapping[bytes, bytes]) -> "CellSettings | None":
        """From `HGETALL {cell}:settings`; None while no scheduler has published any."""
        names = [field.name for field in fields(cls)]
        if not all(name.encode() in found for name in names):
            return None
        return cls(**{name: int(found[name.encode()]) for name in names})

    def differences(self, own: "CellSettings") -> str:
        """Where the cell differs from what a scheduler was started with, as one line; empty where it does not."""
        pairs = zip(asdict(self).items(), asdict(own).values(), strict=True)
        return ", ".join(
            f"{name} is {value} in this cell, not {ours}" for (name, value), ours in pairs if value != ours
        )

    def tell(self, own: "CellSettings") -> None:
        """Log where they differ, if anywhere: the cell's count."""
        if found := self.differences(own):
            logs.get().warning("CELL_SETTINGS_DIFFER", reason=f"{found}: those of the scheduler that began last count")


def read_cell_settings(client: redis.Redis, keys: Keys) -> CellSettings | None:
    """Those in force."""
    return CellSettings.from_redis(cast(Any, client.hgetall(keys.settings)))


async def read_cell_settings_async(client: redis.asyncio.Redis, keys: Keys) -> CellSettings | None:
    """As `read_cell_settings`."""
    return CellSettings.from_redis(await cast(Any, client.hgetall(keys.settings)))


def publish_cell_settings(client: redis.Redis, keys: Keys, settings: CellSettings) -> None:
    """From now on these."""
    client.hset(keys.settings, mapping=cast(Any, asdict(settings)))

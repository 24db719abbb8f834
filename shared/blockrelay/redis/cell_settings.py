"""Settings that all services of a cell share, in `{cell}:settings`: a scheduler writes them, other services read them.

The scheduler that started last decides. Before any has started, the defaults hold. Functions with a client raise
RedisTrouble if Redis fails; the client must be one of `blockrelay.redis.client`.
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
    """The settings that all services of a cell share."""

    retention_s: int = RETENTION_S  # how long a finished request can be read
    dead_after_ms: int = DEAD_AFTER_MS  # time without a heartbeat after which a worker is dead

    @classmethod
    def of(cls, settings: SchedulerSettings) -> "CellSettings":
        """Returns the shared settings that a scheduler was started with."""
        return cls(retention_s=settings.retention_s, dead_after_ms=int(1000 * settings.dead_after_s))

    @classmethod
    def from_redis(cls, record: Mapping[bytes, bytes]) -> "CellSettings | None":
        """Reads the fields of `{cell}:settings`; None while no scheduler has published any."""
        names = [field.name for field in fields(cls)]
        if not all(name.encode() in record for name in names):
            return None
        return cls(**{name: int(record[name.encode()]) for name in names})

    def differences(self, own: "CellSettings") -> str:
        """Returns in one line how the cell's settings differ from `own`, one service's; empty if they do not."""
        pairs = zip(asdict(self).items(), asdict(own).values(), strict=True)
        return ", ".join(
            f"{name} is {value} in this cell, not {ours}" for (name, value), ours in pairs if value != ours
        )

    def tell(self, own: "CellSettings") -> None:
        """Logs how the cell's settings, which count, differ from `own`, if they do."""
        if differences := self.differences(own):
            reason = f"{differences}: the settings of the scheduler that started last count"
            logs.get().warning("CELL_SETTINGS_DIFFER", reason=reason)


def read_cell_settings(client: redis.Redis, keys: Keys) -> CellSettings | None:
    """Returns the cell's settings in force; None while no scheduler has published any."""
    return CellSettings.from_redis(cast(Any, client.hgetall(keys.settings)))


async def read_cell_settings_async(client: redis.asyncio.Redis, keys: Keys) -> CellSettings | None:
    """Does what `read_cell_settings` does, on an asyncio client."""
    return CellSettings.from_redis(await cast(Any, client.hgetall(keys.settings)))


def publish_cell_settings(client: redis.Redis, keys: Keys, settings: CellSettings) -> None:
    """Makes `settings` those of the cell."""
    client.hset(keys.settings, mapping=cast(Any, asdict(settings)))

"""The Redis servers of one cell, with everything that the parts of a gateway need to work on them."""

from dataclasses import dataclass

import redis.asyncio

from blockrelay.observability.metrics.gateway import GatewayMetrics
from blockrelay.observability.metrics.tenants import TenantMetrics
from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import AsyncScripts, ReadReplicated
from blockrelay.redis.errors import RedisWatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellLinks:
    """One cell as the parts of a gateway reach it; all parts of the cell share it."""

    keys: Keys
    client: redis.asyncio.Redis
    """The client of the control Redis."""
    payload: redis.asyncio.Redis
    """The client of the payload Redis, which may be the same server."""
    scripts: AsyncScripts
    gateway: str
    """The id of this gateway in the cell."""
    model: str
    """The served model's key in Redis."""
    metrics: GatewayMetrics
    tenants: TenantMetrics
    watch: RedisWatch
    """Logs and counts failures of Redis."""
    replicated: ReadReplicated | None = None
    """Reads only what replicas of Redis have too, for tokens of nondeterministic devices; None: they are read at once,
    like all others."""

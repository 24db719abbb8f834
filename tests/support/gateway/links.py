"""The links of a gateway's cell, for tests of single parts."""

import redis.asyncio
from prometheus_client import CollectorRegistry

from blockrelay.observability.metrics.gateway import GatewayMetrics
from blockrelay.observability.metrics.tenants import TenantMetrics
from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import AsyncScripts, ReadReplicated
from blockrelay.redis.errors import RedisWatch
from blockrelay_gateway.streaming.cell_links import CellLinks


def links_on(client: redis.asyncio.Redis, *, cell: str = "t", replicated: ReadReplicated | None = None) -> CellLinks:
    """One Redis for everything, which the gateway `g` reaches with `client`."""
    metrics, keys = GatewayMetrics(CollectorRegistry()), Keys(cell)
    return CellLinks(
        keys=keys,
        client=client,
        payload=client,
        scripts=AsyncScripts(client, keys),
        gateway="g",
        model="m",
        metrics=metrics,
        tenants=TenantMetrics(CollectorRegistry()),
        watch=RedisWatch(metrics.redis_errors),
        replicated=replicated,
    )

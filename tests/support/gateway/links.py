"""The links of a gateway's cell and a request that it reads, for tests of single parts."""

import numpy as np
import redis.asyncio
from prometheus_client import CollectorRegistry

from blockrelay.observability.metrics.gateway import GatewayMetrics
from blockrelay.observability.metrics.tenants import TenantMetrics
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.redis.client import AsyncScripts, ReadReplicated
from blockrelay.redis.errors import RedisWatch
from blockrelay_gateway.streaming.active_requests.acceptance import Acceptance
from blockrelay_gateway.streaming.active_requests.active_request import ActiveRequest
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


def followed(request_id: str = "req-1") -> ActiveRequest:
    """A request of one token that a gateway reads."""
    params = SamplingParams(max_tokens=4, temperature=0.0)
    body = RequestBody(prompt=np.array([1], np.int32), params=params.to_dict())
    return ActiveRequest(Acceptance(request_id=request_id, body=body, model="m", pages_needed=1), params, created=0)

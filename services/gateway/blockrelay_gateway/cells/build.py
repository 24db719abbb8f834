"""Builds one cell of a gateway from its parts; nothing is connected yet."""

import asyncio
from collections.abc import Sequence
from functools import partial
from secrets import token_hex

from prometheus_client import CollectorRegistry

from blockrelay.cell_list import CellPlace
from blockrelay.observability.metrics.gateway import GatewayMetrics
from blockrelay.observability.metrics.tenants import TenantMetrics
from blockrelay.observability.registry import ServiceRegistry
from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import AsyncScripts, connect_async
from blockrelay.redis.errors import RedisWatch
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.admission.accept import Admission, Streaming
from blockrelay_gateway.admission.cell_watch import CellWatch
from blockrelay_gateway.admission.open_ended import PoolShares
from blockrelay_gateway.admission.tensor_results import TensorResults
from blockrelay_gateway.cells.cell import Cell, ServedModel
from blockrelay_gateway.cells.readiness import Readiness
from blockrelay_gateway.draining.drain import Drain
from blockrelay_gateway.http.background import Background
from blockrelay_gateway.policy import REDIS_CONNECTIONS
from blockrelay_gateway.streaming.active_requests.abandonment import Abandonment
from blockrelay_gateway.streaming.active_requests.accounting import Accounting
from blockrelay_gateway.streaming.active_requests.gateway_lease import GatewayLease
from blockrelay_gateway.streaming.active_requests.lost_request_repair import LostRequestRepair
from blockrelay_gateway.streaming.active_requests.request_registry import RequestRegistry
from blockrelay_gateway.streaming.active_requests.resumption import Resumption
from blockrelay_gateway.streaming.log_tailer import Tailer
from blockrelay_gateway.streaming.records import Records
from blockrelay_gateway.streaming.status_events import StatusEventFeed
from blockrelay_gateway.tracing.ended_requests import EndedRequests, Traces


def build_cell(
    place: CellPlace,
    served: ServedModel,
    settings: GatewaySettings,
    *,
    broken: asyncio.Event,
    drain: Drain,
    names: Sequence[str] = (),
    registry: CollectorRegistry | None = None,
    traces: Traces | None = None,
) -> Cell:
    """Builds the cell at `place`.

    `broken` is set when background work fails, `drain` has the phase of the gateway's end, `names` are those of all
    tenants. `registry` collects the metrics (None: one of their own), `traces` takes spans (None: no tracing).
    """
    key, blocks = served.key, served.folder.model.blocks
    labels = {"cell": place.name, "model": served.name}
    metrics = GatewayMetrics(registry or ServiceRegistry(labels), blocks=blocks)
    tenants = TenantMetrics(ServiceRegistry(labels))
    tenants.expect(names)
    watch = RedisWatch(metrics.redis_errors, cell=place.name)
    name, keys = token_hex(8), Keys(place.name)
    client, payload = (
        connect_async(url, cell=place.name, connections=REDIS_CONNECTIONS)
        for url in (place.redis_url, place.payload_redis_url or place.redis_url)
    )
    scripts = AsyncScripts(client, keys)

    replicas = settings.accept_replicas
    replicated = partial(scripts.read_what_replicas_have, replicas, keys.wake(name)) if replicas else None
    tailer = Tailer(client, keys, name, metrics, watch, replicated=replicated)
    records = Records(client, keys, key, replicated=replicated)
    lease = GatewayLease(client, keys, scripts, name)
    abandonment = Abandonment(lease, scripts, watch, gateway=name, grace_s=settings.grace_s)
    ended = None
    if traces is not None:
        ended = EndedRequests(traces, client, payload, keys, records, watch, model=served.name, cell=place.name)
    state = CellWatch(client, keys, scripts, lease, metrics, watch)
    accounting = Accounting(metrics, tenants, [state.ended, *([ended.ended] if ended else [])])
    active_requests = RequestRegistry(tailer, accounting, abandonment)
    resumption = Resumption(client, keys, records, lease, active_requests, model=key)
    repair = LostRequestRepair(
        client, keys, scripts, tailer, records, lease, active_requests, watch, gateway=name, now_ms=state.now_ms
    )

    readiness = Readiness(client, keys, metrics, model=key, drain=drain, on_error=watch.count_error)
    of_its_own = place.payload_redis_url not in (None, place.redis_url)
    results = TensorResults(client, payload, keys, watch, of_its_own=of_its_own)
    admission = Admission(
        scripts,
        Streaming(registry=active_requests, lease=lease, records=records, resumption=resumption),
        state,
        results,
        PoolShares(client, keys, model=key),
        metrics,
        tenants,
        watch,
        gateway=name,
        model=key,
        blocks=blocks,
        settings=settings,
    )
    status_events = StatusEventFeed(client, keys, watch)
    works = {
        "tailer": tailer.run,
        "repair": repair.watch,
        "admission": state.watch,
        "results": results.watch,
        "status events": status_events.run,
    }
    if settings.cells:
        works["readiness"] = readiness.watch
    if ended is not None:
        works["traces"] = ended.run
    return Cell(
        served=served,
        keys=keys,
        client=client,
        payload=payload,
        scripts=scripts,
        metrics=metrics,
        tenants=tenants,
        watch=watch,
        tailer=tailer,
        records=records,
        registry=active_requests,
        resumption=resumption,
        state=state,
        readiness=readiness,
        results=results,
        status_events=status_events,
        admission=admission,
        background=Background(works, broken),
        keep_alive_s=settings.keep_alive_s,
    )

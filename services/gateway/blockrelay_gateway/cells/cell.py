"""One cell as a gateway serves it: its two Redis servers, and the parts that work on them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from secrets import token_hex

from prometheus_client import CollectorRegistry

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.cell_list import CellPlace
from blockrelay.observability.metrics.gateway import GatewayMetrics
from blockrelay.observability.metrics.tenants import TenantMetrics
from blockrelay.observability.registry import ServiceRegistry
from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import AsyncScripts, connect_async
from blockrelay.redis.errors import RedisWatch
from blockrelay.settings import GatewaySettings
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.admission.accept import Admission
from blockrelay_gateway.admission.cell_watch import CellWatch
from blockrelay_gateway.admission.tensor_results import TensorResults
from blockrelay_gateway.cells.readiness import Readiness
from blockrelay_gateway.draining.drain import Drain
from blockrelay_gateway.http.background import Background
from blockrelay_gateway.policy import REDIS_CONNECTIONS
from blockrelay_gateway.streaming.active_requests.abandonment import Abandonment
from blockrelay_gateway.streaming.active_requests.accounting import RequestAccounting
from blockrelay_gateway.streaming.active_requests.active_request import ActiveRequest
from blockrelay_gateway.streaming.active_requests.gateway_lease import GatewayLease
from blockrelay_gateway.streaming.active_requests.lost_request_repair import LostRequestRepair
from blockrelay_gateway.streaming.active_requests.request_registry import RequestRegistry
from blockrelay_gateway.streaming.active_requests.resumption import Resumption
from blockrelay_gateway.streaming.cell_links import CellLinks
from blockrelay_gateway.streaming.deltas import Relay, status_of_record
from blockrelay_gateway.streaming.log_tailer import Tailer
from blockrelay_gateway.streaming.readers import Readers
from blockrelay_gateway.streaming.records import Records
from blockrelay_gateway.streaming.status_events import StatusEventFeed
from blockrelay_gateway.tracing.ended_requests import EndedRequests, Traces


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model of a gateway, the same in all its cells.

    `name` is its name in the API. Without a `tokenizer` clients send and get token ids only.
    """

    folder: BlockFolder
    name: str
    tokenizer: Tokenizer | None


class Cell:
    """The parts of one cell, and the actions of routes that need several parts.

    It is a ResponseSource of `streaming.responses`: answers get its `relay` and `keep_alive_s`.
    """

    def __init__(
        self,
        place: CellPlace,
        served: ServedModel,
        settings: GatewaySettings,
        *,
        broken: asyncio.Event,
        drain: Drain,
        names: Sequence[str] = (),
        registry: CollectorRegistry | None = None,
        traces: Traces | None = None,
        ended: Sequence[Callable[[ActiveRequest], None]] = (),
    ) -> None:
        """Builds all parts of the cell at `place`; nothing is connected yet.

        `broken` is set when background work fails, `drain` has the phase of the gateway's end, `names` are those of all
        tenants. `registry` collects the metrics (None: one of their own), `traces` takes spans (None: no tracing).
        `ended` are called with each request that ends, as by RequestAccounting.
        """
        links = _links(place, served, settings, registry)
        links.tenants.expect(names)
        lease = GatewayLease(links)
        self.links, self.served, self.keep_alive_s = links, served, settings.keep_alive_s
        self.tailer = Tailer(links)
        self.records = Records(links)
        self.state = CellWatch(links, lease)
        traced = None if traces is None else EndedRequests(traces, links, self.records, model=served.name)
        accounting = RequestAccounting(links, [self.state.ended, *([] if traced is None else [traced.ended]), *ended])
        abandonment = Abandonment(links, lease, grace_s=settings.grace_s)
        self.registry = RequestRegistry(self.tailer, accounting, abandonment)
        self.resumption = Resumption(links, self.records, lease, self.registry)
        repair = LostRequestRepair(links, self.tailer, self.records, lease, self.registry, now_ms=self.state.now_ms)
        self.readiness = Readiness(links, drain)
        self.results = TensorResults(links, of_its_own=place.payload_redis_url not in (None, place.redis_url))
        self.admission = Admission(
            links,
            self.registry,
            lease,
            self.records,
            self.resumption,
            self.state,
            self.results,
            blocks=served.folder.model.blocks,
            settings=settings,
        )
        self.status_events = StatusEventFeed(links)
        works = {
            "tailer": self.tailer.run,
            "repair": repair.watch,
            "admission": self.state.watch,
            "results": self.results.watch,
            "status events": self.status_events.run,
        }
        if settings.cells:
            works["readiness"] = self.readiness.watch
        if traced is not None:
            works["traces"] = traced.run
        self.background = Background(works, broken)

    @property
    def name(self) -> str:
        """The cell's name."""
        return self.links.keys.cell

    @property
    def reachable(self) -> bool:
        """True unless its control Redis failed the last read, or its protocol is not this gateway's."""
        return not self.tailer.away and not self.state.protocol_gap

    def relay(self, active: ActiveRequest) -> Relay:
        """Returns a new Relay, for one reader of `active`."""
        body, eos_ids = active.body, self.served.folder.model.eos_ids
        return Relay(self.served.tokenizer, active.params, eos_ids, body.prompt, body.shown)

    async def status(self, readers: Readers) -> str:
        """The status of the first request, as in GET /v1/requests/{id}: "queued" if it is new, else that of its record.

        Raises RedisTrouble if the record cannot be read.
        """
        if not readers.replayed:
            return "queued"
        return status_of_record(*await self.records.state_and_end(readers.requests[0].id))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the background work while the context is open; closes the Redis connections at the end.

        It may be opened once.
        """
        try:
            async with self.background.running():
                try:
                    yield
                finally:
                    self.close()
        finally:
            await self.links.client.aclose()
            await self.links.payload.aclose()

    def close(self) -> None:
        """Ends all readers of requests and status events, because the gateway ends; the requests go on."""
        self.registry.close()
        self.status_events.close()


def _links(
    place: CellPlace, served: ServedModel, settings: GatewaySettings, registry: CollectorRegistry | None
) -> CellLinks:
    labels = {"cell": place.name, "model": served.name}
    metrics = GatewayMetrics(registry or ServiceRegistry(labels), blocks=served.folder.model.blocks)
    client, payload = (
        connect_async(url, cell=place.name, connections=REDIS_CONNECTIONS)
        for url in (place.redis_url, place.payload_redis_url or place.redis_url)
    )
    gateway, keys, replicas = token_hex(8), Keys(place.name), settings.accept_replicas
    scripts = AsyncScripts(client, keys)
    return CellLinks(
        keys=keys,
        client=client,
        payload=payload,
        scripts=scripts,
        gateway=gateway,
        model=served.folder.model_key,
        metrics=metrics,
        tenants=TenantMetrics(ServiceRegistry(labels)),
        watch=RedisWatch(metrics.redis_errors, cell=place.name),
        replicated=partial(scripts.read_what_replicas_have, replicas, keys.wake(gateway)) if replicas else None,
    )

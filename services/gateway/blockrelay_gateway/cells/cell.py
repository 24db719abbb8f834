"""One cell as a gateway serves it: its two Redis servers, and the parts that work on them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import redis.asyncio

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.observability.metrics.gateway import GatewayMetrics
from blockrelay.observability.metrics.tenants import TenantMetrics
from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import AsyncScripts
from blockrelay.redis.errors import RedisWatch
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.admission.accept import Admission
from blockrelay_gateway.admission.cell_watch import CellWatch
from blockrelay_gateway.admission.tensor_results import TensorResults
from blockrelay_gateway.cells.readiness import Readiness
from blockrelay_gateway.http.background import Background
from blockrelay_gateway.streaming.active_requests.active_request import ActiveRequest
from blockrelay_gateway.streaming.active_requests.request_registry import RequestRegistry
from blockrelay_gateway.streaming.active_requests.resumption import Resumption
from blockrelay_gateway.streaming.deltas import Relay, status_of_record
from blockrelay_gateway.streaming.log_tailer import Tailer
from blockrelay_gateway.streaming.readers import Readers
from blockrelay_gateway.streaming.records import Records
from blockrelay_gateway.streaming.status_events import StatusEventFeed


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model of a gateway, the same in all its cells. `key` is its name in Redis, `name` its name in the API."""

    folder: BlockFolder
    key: str
    name: str
    tokenizer: Tokenizer | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cell:
    """The parts of one cell, and the actions of routes that need several parts. It is a ResponseSource."""

    served: ServedModel
    keys: Keys
    client: redis.asyncio.Redis
    payload: redis.asyncio.Redis
    scripts: AsyncScripts
    metrics: GatewayMetrics
    tenants: TenantMetrics
    watch: RedisWatch
    tailer: Tailer
    records: Records
    registry: RequestRegistry
    resumption: Resumption
    state: CellWatch
    readiness: Readiness
    results: TensorResults
    status_events: StatusEventFeed
    admission: Admission
    background: Background
    keep_alive_s: float

    @property
    def name(self) -> str:
        """The cell's name."""
        return self.keys.cell

    @property
    def reachable(self) -> bool:
        """True unless its Redis failed the last read, or its protocol is not this gateway's."""
        return not self.tailer.away and not self.state.protocol_gap

    def relay(self, active: ActiveRequest) -> Relay:
        """Returns a new Relay, for one reader of `active`."""
        return Relay(self.served.tokenizer, active.params, self.served.folder.model.eos_ids, active.body.prompt)

    async def status(self, readers: Readers) -> str:
        """The status of the first request, as in GET /v1/requests/{id}."""
        if not readers.replayed:
            return "queued"
        return status_of_record(*await self.records.state_and_end(readers.requests[0].id))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the background work while the context is open; closes the Redis connections at the end."""
        try:
            async with self.background.running():
                try:
                    yield
                finally:
                    self.close()
        finally:
            await self.client.aclose()
            await self.payload.aclose()

    def close(self) -> None:
        """Ends all readers of requests and status events, because the gateway ends; the requests go on."""
        self.registry.close()
        self.status_events.close()

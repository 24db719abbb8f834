"""One cell as a gateway serves it: its two Redis servers, and everything that works on them."""

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
from blockrelay_gateway.admission.tensor_results import Results
from blockrelay_gateway.cells.readiness import Readiness
from blockrelay_gateway.http.background import Background
from blockrelay_gateway.streaming.deltas import Relay, status_of_record
from blockrelay_gateway.streaming.following.followed_request import FollowedRequest
from blockrelay_gateway.streaming.following.registry import FollowedRequests
from blockrelay_gateway.streaming.following.resumption import Resumption
from blockrelay_gateway.streaming.log_tailer import Tailer
from blockrelay_gateway.streaming.readers import Readers
from blockrelay_gateway.streaming.records import Records
from blockrelay_gateway.streaming.status_events import StatusEvents


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model of a gateway, the same in all its cells. `key` is its name in Redis, `name` that of clients."""

    folder: BlockFolder
    key: str
    name: str
    tokenizer: Tokenizer | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cell:
    """The parts, and what routes do with several of them. It answers for its own requests (`responses.Source`)."""

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
    followed: FollowedRequests
    resumption: Resumption
    state: CellWatch
    readiness: Readiness
    results: Results
    status_events: StatusEvents
    admission: Admission
    background: Background
    keep_alive_s: float

    @property
    def name(self) -> str:
        return self.keys.cell

    @property
    def reachable(self) -> bool:
        """Whether it answered when it was last asked, and speaks our protocol."""
        return not self.tailer.away and not self.state.protocol_gap

    def relay(self, followed: FollowedRequest) -> Relay:
        """A fresh relay for one reader of `followed`."""
        return Relay(self.served.tokenizer, followed.params, self.served.folder.model.eos_ids, followed.body.prompt)

    async def status(self, readers: Readers) -> str:
        """Of the first request, as GET /v1/requests/{id} says it."""
        if not readers.replayed:
            return "queued"
        return status_of_record(*await self.records.state_and_end(readers.requests[0].id))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Background work from start to end, then the connections are closed."""
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
        """No reader is waited for any more; requests go on."""
        self.followed.close()
        self.status_events.close()

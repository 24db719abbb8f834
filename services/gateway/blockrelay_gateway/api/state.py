"""What the routes of all APIs share: the gateway's parts, built once (`build`)."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import redis.asyncio
from pydantic import BaseModel
from starlette.requests import HTTPConnection

from blockrelay.auth.api_keys import Tenant
from blockrelay.block_folder.folder import BlockFolder
from blockrelay.observability.metrics.gateway import GatewayMetrics
from blockrelay.observability.metrics.tenants import TenantMetrics
from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import AsyncScripts
from blockrelay.redis.errors import RedisWatch
from blockrelay.settings import GatewaySettings
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.admission.accept import Admission
from blockrelay_gateway.admission.cell_watch import CellWatch
from blockrelay_gateway.admission.idempotency import Identity, identify
from blockrelay_gateway.admission.tensor_results import Results
from blockrelay_gateway.api.openai.requests import OpenAIRequests
from blockrelay_gateway.api.operations.readiness import Readiness
from blockrelay_gateway.api.request_builder import RequestBuilder
from blockrelay_gateway.http.background import Background
from blockrelay_gateway.http.body_budget import BodyBudget, BodyTimeout
from blockrelay_gateway.http.errors import ErrorResponder
from blockrelay_gateway.streaming.deltas import Relay, status_of_record
from blockrelay_gateway.streaming.following.followed_request import FollowedRequest
from blockrelay_gateway.streaming.following.registry import FollowedRequests
from blockrelay_gateway.streaming.following.repair import Repair
from blockrelay_gateway.streaming.following.resumption import Resumption
from blockrelay_gateway.streaming.log_tailer import Tailer
from blockrelay_gateway.streaming.readers import Readers
from blockrelay_gateway.streaming.records import Records
from blockrelay_gateway.streaming.status_events import StatusEvents


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The parts of one gateway, and what all routes do with several of them."""

    settings: GatewaySettings
    folder: BlockFolder
    model_key: str
    model_name: str
    tokenizer: Tokenizer | None
    builder: RequestBuilder
    openai: OpenAIRequests
    metrics: GatewayMetrics
    tenants: TenantMetrics
    watch: RedisWatch
    responder: ErrorResponder
    keys: Keys
    client: redis.asyncio.Redis
    payload: redis.asyncio.Redis
    scripts: AsyncScripts
    tailer: Tailer
    records: Records
    followed: FollowedRequests
    resumption: Resumption
    repair: Repair
    cell: CellWatch
    readiness: Readiness
    results: Results
    status_events: StatusEvents
    admission: Admission
    body_timeout: BodyTimeout
    bodies: BodyBudget
    background: Background

    @property
    def keep_alive_s(self) -> float:
        return self.settings.keep_alive_s

    def identify(self, keys: Sequence[str], body: BaseModel, tenant: Tenant, route: str) -> Identity:
        """`idempotency.identify` for this gateway. Raises BadRequest."""
        secret = self.settings.idempotency_secret
        return identify(keys, body, tenant=tenant.name, route=route, model=self.model_key, secret=secret)

    def relay(self, followed: FollowedRequest) -> Relay:
        """A fresh relay for one reader of `followed`."""
        return Relay(self.tokenizer, followed.params, self.folder.model.eos_ids)

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
        """No reader and no body is waited for any more; requests go on."""
        self.followed.close()
        self.status_events.close()
        self.body_timeout.close()


def of(connection: HTTPConnection) -> Gateway:
    """The gateway that serves this connection."""
    gateway = connection.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway

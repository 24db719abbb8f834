"""What the routes of all APIs share: the gateway's parts, built once (`build`)."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pydantic import BaseModel
from starlette.requests import HTTPConnection

from blockrelay.auth.api_keys import Tenant
from blockrelay.block_folder.folder import BlockFolder
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.admission.idempotency import Identity, identify
from blockrelay_gateway.api.infer.session_kv import ServedKv
from blockrelay_gateway.api.openai.requests import OpenAIRequests
from blockrelay_gateway.api.request_builder import RequestBuilder
from blockrelay_gateway.cells.cell import ServedModel
from blockrelay_gateway.cells.cells import Cells
from blockrelay_gateway.cells.submission import Submission
from blockrelay_gateway.http.body_budget import BodyBudget, BodyTimeout
from blockrelay_gateway.http.errors import ErrorResponder
from blockrelay_gateway.tracing.ended_requests import Traces


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The parts of one gateway. What belongs to one cell is in `cells`."""

    settings: GatewaySettings
    served: ServedModel
    kv: ServedKv
    builder: RequestBuilder
    openai: OpenAIRequests
    responder: ErrorResponder
    cells: Cells
    submission: Submission
    traces: Traces | None
    body_timeout: BodyTimeout
    bodies: BodyBudget

    @property
    def keep_alive_s(self) -> float:
        return self.settings.keep_alive_s

    @property
    def folder(self) -> BlockFolder:
        return self.served.folder

    @property
    def model_name(self) -> str:
        return self.served.name

    @property
    def broken(self) -> asyncio.Event:
        """Set when background work has failed: only a restart helps."""
        return self.cells.broken

    def identify(self, keys: Sequence[str], body: BaseModel, tenant: Tenant, route: str) -> Identity:
        """`idempotency.identify` for this gateway. Raises BadRequest."""
        secret = self.settings.idempotency_secret
        return identify(keys, body, tenant=tenant.name, route=route, model=self.served.key, secret=secret)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Background work from start to end, then the connections are closed."""
        try:
            async with self.cells.running():
                try:
                    yield
                finally:
                    self.close()
        finally:
            if self.traces is not None:
                await self.traces.close()

    def close(self) -> None:
        """No reader and no body is waited for any more; requests go on."""
        self.cells.close()
        self.body_timeout.close()


def of(connection: HTTPConnection) -> Gateway:
    """The gateway that serves this connection."""
    gateway = connection.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway

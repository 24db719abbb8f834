"""The gateway's parts, built once and passed to every route."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, cast

import redis.asyncio
from fastapi import Request, WebSocket
from pydantic import BaseModel

from blockrelay.auth.api_keys import Tenant
from blockrelay.block_folder.folder import BlockFolder
from blockrelay.observability import logs
from blockrelay.observability.metrics import GatewayMetrics
from blockrelay.observability.registry import service_registry
from blockrelay.protocol.keys import Keys
from blockrelay.redis import client as redis_link
from blockrelay.redis.client import AsyncScripts
from blockrelay.redis.errors import RedisWatch
from blockrelay.settings import GatewaySettings
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.admission.accept import Admission
from blockrelay_gateway.admission.idempotency import Identity, identify
from blockrelay_gateway.admission.tensor_results import Results
from blockrelay_gateway.api.openai.chat_template import ChatTemplate
from blockrelay_gateway.api.request_builder import Translator
from blockrelay_gateway.http.connection_limit import Arrivals, BodyBudget
from blockrelay_gateway.http.errors import Refusals
from blockrelay_gateway.streaming.deltas import Relay, status_of_record
from blockrelay_gateway.streaming.followed_requests import Flight, Flights
from blockrelay_gateway.streaming.log_tailer import Tailer
from blockrelay_gateway.streaming.readers import Readers

CONNECTIONS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """Everything a route needs."""

    settings: GatewaySettings
    folder: BlockFolder
    model_key: str
    model_name: str
    tokenizer: Tokenizer | None
    translator: Translator
    metrics: GatewayMetrics
    watch: RedisWatch
    refusals: Refusals
    keys: Keys
    client: redis.asyncio.Redis
    payload: redis.asyncio.Redis
    scripts: AsyncScripts
    tailer: Tailer
    flights: Flights
    results: Results
    admission: Admission
    arrivals: Arrivals
    bodies: BodyBudget
    tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])
    broken: asyncio.Event = field(default_factory=asyncio.Event)  # work in the background has failed

    def identify(self, keys: Sequence[str], body: BaseModel, tenant: Tenant, route: str) -> Identity:
        """`identity.identify` for this gateway. Raises BadRequest."""
        secret = self.settings.idempotency_secret
        return identify(keys, body, tenant=tenant.name, route=route, model=self.model_key, secret=secret)

    def relay(self, flight: Flight) -> Relay:
        """A fresh relay for one reader of `flight`."""
        return Relay(self.tokenizer, flight.params, self.folder.model.eos_ids)

    def works(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """What runs in the background for as long as the gateway does, by name. Each ends when it is cancelled."""
        return {
            "tailer": self.tailer.run,
            "flights": self.flights.watch,
            "admission": self.admission.watch,
            "results": self.results.watch,
        }

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Background work from start to end."""
        for name, work in self.works().items():
            task = asyncio.create_task(work(), name=name)
            task.add_done_callback(self._ended)
            self.tasks.append(task)
        try:
            yield
        finally:
            self.close()
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)
            await self.client.aclose()
            await self.payload.aclose()

    def close(self) -> None:
        """No reader and no body is waited for any more; requests go on."""
        self.flights.close()
        self.arrivals.close()

    async def status(self, readers: Readers) -> str:
        """Of the first request, as GET /v1/requests/{id} says it."""
        if not readers.replayed:
            return "queued"
        name = self.keys.request(readers.flights[0].request)
        state, end = cast(tuple[bytes | None, bytes | None], await cast(Any, self.client.hmget(name, "state", "end")))
        return status_of_record((state or b"queued").decode(), (end or b"").decode())

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logs.get().error("BACKGROUND_WORK_FAILED", work=task.get_name(), error=repr(error), exc_info=error)
            self.broken.set()

    def stopped(self) -> list[str]:
        """Background work that ended although the gateway runs: only a restart helps."""
        return [task.get_name() for task in self.tasks if task.done()]


def build(settings: GatewaySettings, folder: BlockFolder) -> Gateway:
    """All parts, connected to nothing yet. Raises BlockFolderError for an unusable tokenizer or template."""
    model = folder.model
    tokenizer = Tokenizer.from_file(folder.tokenizer_path) if folder.tokenizer_path else None
    source = folder.chat_template()
    template = ChatTemplate(source, bos_token=model.bos_token, eos_token=model.eos_token) if source else None
    gateway_id, keys = token_hex(8), Keys(settings.cell)
    model_key, model_name = folder.manifest.model_hash[:16], settings.model_name or model.name
    metrics = GatewayMetrics(service_registry("gateway"))
    watch = RedisWatch(metrics.redis_errors)
    client = redis_link.connect_async(settings.redis_url, connections=CONNECTIONS)
    payload = redis_link.connect_async(settings.payload_redis_url or settings.redis_url, connections=CONNECTIONS)
    of_its_own = settings.payload_redis_url not in (None, settings.redis_url)
    results = Results(client, payload, keys, watch, of_its_own=of_its_own)
    scripts = AsyncScripts(client, keys, retention_s=settings.retention_s)
    tailer = Tailer(client, keys, gateway_id, metrics, watch)
    flights = Flights(
        client,
        keys,
        scripts,
        tailer,
        metrics,
        watch,
        gateway=gateway_id,
        model=model_key,
        grace_s=settings.grace_s,
        retention_s=settings.retention_s,
    )
    return Gateway(
        settings=settings,
        folder=folder,
        model_key=model_key,
        model_name=model_name,
        tokenizer=tokenizer,
        translator=Translator(
            name=model_name,
            model=model,
            generation=folder.manifest.generation,
            tokenizer=tokenizer,
            template=template,
            default_max_tokens=settings.default_max_tokens,
        ),
        metrics=metrics,
        watch=watch,
        refusals=Refusals(metrics.rejections, metrics.limited),
        keys=keys,
        client=client,
        payload=payload,
        scripts=scripts,
        tailer=tailer,
        flights=flights,
        results=results,
        admission=Admission(
            client,
            scripts,
            flights,
            results,
            metrics,
            watch,
            gateway=gateway_id,
            model=model_key,
            blocks=model.blocks,
            settings=settings,
        ),
        arrivals=Arrivals(settings.arrival_timeout_s),
        bodies=BodyBudget(max(settings.max_body_bytes, settings.max_bodies_bytes)),
    )


def of(connection: Request | WebSocket) -> Gateway:
    """The gateway that serves this connection."""
    gateway = connection.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway

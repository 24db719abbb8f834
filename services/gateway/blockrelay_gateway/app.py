"""The ASGI application: routes, error shapes, limits, and the lifetime of the background work."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI

from blockrelay import __version__
from blockrelay.auth.web_origins import Rules
from blockrelay.block_folder.folder import open_block_folder
from blockrelay.errors import RedisTrouble
from blockrelay.observability import logs
from blockrelay.protocol.plan import DEVICES
from blockrelay.redis.registry import read_workers_async
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.api.infer import routes as infer_routes
from blockrelay_gateway.api.openai import routes as openai_routes
from blockrelay_gateway.api.operations import routes as ops_routes
from blockrelay_gateway.api.operations.scrape import Scrape
from blockrelay_gateway.api.requests import routes as request_routes
from blockrelay_gateway.api.state import Gateway
from blockrelay_gateway.api.tokenizer import routes as tokenizer_routes
from blockrelay_gateway.api.unread import RefusedUnread
from blockrelay_gateway.build import build
from blockrelay_gateway.cells.cell import Cell
from blockrelay_gateway.http import errors as http_errors
from blockrelay_gateway.http.authentication import Authentication, KeyRing
from blockrelay_gateway.http.background import Background
from blockrelay_gateway.http.body_limit import BodyLimit
from blockrelay_gateway.http.connection_limit import ConnectionLimit
from blockrelay_gateway.http.front import Front, OptionsResponder
from blockrelay_gateway.http.origins import Origins
from blockrelay_gateway.http.targets import Targets
from blockrelay_gateway.policy import KEY_FILE_POLL_S, READY_POLL_S

ROUTERS = (
    openai_routes.router,
    tokenizer_routes.router,
    infer_routes.router,
    request_routes.router,
    ops_routes.router,
)


def create_app(settings: GatewaySettings) -> FastAPI:
    """Opens the block folder (only small files are read) and builds the application; it connects to Redis when it runs.

    Raises BlockFolderError if the folder cannot be used. Raises UsageError if the file of API keys, the file of cells,
    or a list of origins or names cannot be used, or if traces are wanted and cannot be sent.
    """
    ring, rules = KeyRing(settings.api_keys), Rules.of(settings)
    gateway = build(settings, open_block_folder(settings.model, blocks=()), tenants=ring.names)
    works = {"API keys": partial(_watch_keys, ring, gateway)} if settings.api_keys else {}
    watching = Background(works, gateway.cells.broken)
    scrape = Scrape(gateway.cells)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with gateway.running(), watching.running():
            saying = asyncio.create_task(_say_when_ready(gateway), name="readiness")
            try:
                with scrape.answered():
                    yield
            finally:
                saying.cancel()
                await asyncio.gather(saying, return_exceptions=True)

    # No /docs: its page loads scripts from other hosts. /openapi.json is there.
    app = FastAPI(
        title="Blockrelay", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        servers=[{"url": settings.root_path}] if settings.root_path else None,  # for generated clients
    )  # fmt: skip
    app.state.gateway, app.state.scrape = gateway, scrape
    http_errors.install(app, gateway.responder, gateway.cells.count_error)
    app.add_middleware(
        BodyLimit,
        max_bytes=settings.max_body_bytes,
        budget=gateway.bodies,
        timeout=gateway.body_timeout,
        responder=gateway.responder,
    )
    routes = [route for router in ROUTERS for route in router.routes]
    if settings.metrics_port is not None:
        routes = [route for route in routes if getattr(route, "path", None) != ops_routes.METRICS]
    app.add_middleware(Targets, routes=[*app.routes, *routes], responder=gateway.responder)
    app.add_middleware(RefusedUnread, cells=gateway.cells, settings=settings, responder=gateway.responder)
    app.add_middleware(ConnectionLimit, max_connections=settings.max_connections, responder=gateway.responder)
    app.add_middleware(Authentication, ring=ring, responder=gateway.responder)
    # The last one added is the first to run.
    app.add_middleware(OptionsResponder, routes=[*app.routes, *routes])
    app.add_middleware(Origins, rules=rules, routes=routes, responder=gateway.responder)
    app.add_middleware(Front, root_path=settings.root_path, drain=gateway.drain)
    # Not include_router: it would analyse each handler again for every application, at the first request.
    app.router.routes.extend(routes)
    return app


async def _watch_keys(ring: KeyRing, gateway: Gateway) -> None:
    """Looks at the file of API keys every KEY_FILE_POLL_S seconds, also without requests.

    It sets the metrics of the keys in force, and starts the series of new tenants at 0.
    """
    reported = ring.read_at
    while True:
        ring.look()
        for cell in gateway.cells:
            cell.links.metrics.tell_keys(len(ring), ring.read_at, unreadable=ring.unreadable)
            if ring.read_at != reported:
                cell.links.tenants.expect(ring.names)
        reported = ring.read_at
        await asyncio.sleep(KEY_FILE_POLL_S)


async def _say_when_ready(gateway: Gateway) -> None:
    """Logs NODE_READY for each cell, when a token can be produced there for the first time."""
    async with asyncio.TaskGroup() as tasks:
        for cell in gateway.cells:
            tasks.create_task(_say_when_one_is(cell, gateway))


async def _say_when_one_is(cell: Cell, gateway: Gateway) -> None:
    while True:
        try:
            if not await cell.readiness.gaps():
                workers = await read_workers_async(cell.links.client, cell.links.keys, gateway.served.folder.model_key)
                break
        except RedisTrouble:
            cell.links.metrics.redis_errors.inc()  # the next check tries again
        await asyncio.sleep(READY_POLL_S)
    ready = Counter(worker.device for worker in workers if worker.ready)
    counts = {device: ready[device] for device in DEVICES}
    logs.get().info(
        "NODE_READY",
        cell=cell.name,
        model=gateway.served.name,
        model_hash=gateway.served.folder.manifest.model_hash,
        workers={name: count > 0 for name, count in counts.items()},
        worker_counts=counts,
    )

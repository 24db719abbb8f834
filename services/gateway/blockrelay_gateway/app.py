"""The ASGI application: routes, error shapes, limits, and the lifetime of the background work."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from blockrelay import logs
from blockrelay.block_folder import open_block_folder
from blockrelay.settings import GatewaySettings
from blockrelay_gateway import http_errors, infer_routes, openai_routes, openapi, ops_routes, request_routes
from blockrelay_gateway.crowd import BodyBudget, Crowd
from blockrelay_gateway.gateway import build
from blockrelay_gateway.middleware import BodyLimit
from blockrelay_gateway.tenants import Authentication, KeyRing


def create_app(settings: GatewaySettings) -> FastAPI:
    """Opens the block folder (only small files are read) and builds the application; connects to Redis when it runs.

    Raises BlockFolderError when the folder cannot be used, UsageError when the file of API keys cannot.
    """
    ring = KeyRing(settings.api_keys)
    gateway = build(settings, open_block_folder(settings.model, blocks=()))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with gateway.running():
            logs.get().info("NODE_READY", model=gateway.model_name, model_hash=gateway.folder.manifest.model_hash)
            yield

    # No /docs: its page loads scripts from other hosts. /openapi.json is there.
    app = FastAPI(title="Blockrelay", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.gateway = gateway
    http_errors.install(app, gateway.refusals)
    budget = BodyBudget(max(settings.max_body_bytes, settings.max_bodies_bytes))
    app.add_middleware(
        BodyLimit,
        max_bytes=settings.max_body_bytes,
        budget=budget,
        arrivals=gateway.arrivals,
        refusals=gateway.refusals,
    )
    app.add_middleware(Crowd, most=settings.max_connections, refusals=gateway.refusals)
    app.add_middleware(Authentication, ring=ring, refusals=gateway.refusals)  # the last one added is the first to run
    app.include_router(openai_routes.router, responses=openapi.WORK)
    app.include_router(infer_routes.router, responses=openapi.WORK)
    app.include_router(request_routes.router, responses=openapi.ERRORS)
    app.include_router(ops_routes.router, responses=openapi.ERRORS)
    return app

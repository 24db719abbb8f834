"""Routes about the gateway itself, for operators and clients: models, plan, liveness, readiness, metrics."""

import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from secrets import token_hex
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from blockrelay import __version__
from blockrelay.auth.api_keys import Tenant
from blockrelay.block_folder.manifest import Manifest
from blockrelay.errors import ServiceUnavailable, Unauthorized
from blockrelay.observability.metrics.gateway import Question
from blockrelay.observability.metrics.tenants import OneTenant
from blockrelay.observability.registry import Together
from blockrelay.protocol.plan import Plan, WorkerInfo, folder_in_force, missing_stages, parse_split
from blockrelay.protocol.served_folder import ServedFolder
from blockrelay.redis.registry import read_plan_async, read_workers_async
from blockrelay_gateway import policy
from blockrelay_gateway.api import state
from blockrelay_gateway.api.answers.operations import (
    Health,
    Liveness,
    Model,
    ModelList,
    PlanView,
    ReadinessView,
    Root,
    Version,
)
from blockrelay_gateway.api.operations import scrape
from blockrelay_gateway.api.state import Gateway
from blockrelay_gateway.http import authentication, openapi, sse
from blockrelay_gateway.http.errors import JsonAnswer, error_body
from blockrelay_gateway.streaming.status_events import Listener, sees_all

#: Path of the metrics on the clients' port; the route is removed if metrics have a port of their own.
METRICS = "/metrics"
router = APIRouter(responses=openapi.ERRORS)
CellName = Annotated[str | None, Query(description="of several cells; default: the gateway's own")]


@router.get("/v1/models", responses=openapi.answer(ModelList))
async def models(request: Request) -> Response:
    """The one model of this cell."""
    return JsonAnswer({"object": "list", "data": [await _model(state.of(request))]})


@router.get("/v1/models/{name:path}", responses=openapi.answer(Model | ModelList))
async def model(name: str, request: Request) -> Response:
    """The model, if it is ours. Without a name: the list."""
    gateway = state.of(request)
    if not name:
        return await models(request)
    gateway.builder.check_model(name)
    return JsonAnswer(await _model(gateway))


@router.get("/v1/plan", responses=openapi.answer(PlanView))
async def plan(request: Request, cell: CellName = None) -> Response:
    """Which device runs which block, `{"block_1": "CPU", ...}`, in which stages, and why."""
    gateway = state.of(request)
    at = gateway.cells.home if cell is None else gateway.cells.named(cell)
    current = await read_plan_async(at.links.client, at.links.keys, gateway.served.folder.model_key)
    workers = await read_workers_async(at.links.client, at.links.keys, gateway.served.folder.model_key)
    if current is None:
        raise ServiceUnavailable("; ".join(missing_stages(current, workers)))
    return JsonAnswer({"object": "plan", "model": gateway.served.name, **_plan(current, workers)})


@router.get("/v1/status/events", responses=openapi.events())
async def status_events(request: Request) -> Response:
    """What every stage does from now on: a `node_status` at the start and at the end of each step of each request.

    Requests of others stand there without their id, unless the key is an operator's.
    """
    gateway = state.of(request)
    listener = Listener([cell.status_events for cell in gateway.cells], authentication.of(request))
    events = _status_events(listener, gateway.settings.keep_alive_s, partial(authentication.current_tenant, request))
    return sse.EventStream(events, listener, {"x-request-id": f"status-{token_hex(12)}"})


@router.get("/livez", responses=openapi.probe(Liveness))
async def livez(request: Request) -> Response:
    """503 only when a restart of this process would help; says nothing about anything it needs."""
    stopped = state.of(request).cells.stopped()
    return JsonAnswer(
        {"status": "failed" if stopped else "ok", "stopped": stopped}, status_code=503 if stopped else 200
    )


@router.get("/readyz", responses=openapi.probe(ReadinessView))
async def readyz(request: Request, question: Annotated[Question, Query(alias="for")] = "tokens") -> Response:
    """200 only when a token can be produced: Redis answers and every stage of the plan has a live worker.

    `?for=accepting` asks less, what a load balancer wants to know: that Redis answers and this gateway was not told
    to end. Requests are accepted then and wait for workers, ended ones can be read. Of several cells one is enough.
    """
    ready, reasons = await state.of(request).cells.readiness(question)
    return JsonAnswer(
        {"status": "ready" if ready else "not ready", "reasons": reasons}, status_code=200 if ready else 503
    )


@router.get("/health", responses=openapi.probe(Health))
@router.get("/v1/health", responses=openapi.probe(Health))
@router.get("/ping", responses=openapi.probe(Health))
async def health(request: Request) -> Response:
    """What other servers call `/readyz`, without reasons: 503 exactly while no token could be produced."""
    ready, _ = await state.of(request).cells.readiness("tokens")
    return JsonAnswer({"status": "ok" if ready else "not ready"}, status_code=200 if ready else 503)


@router.get("/version", responses=openapi.answer(Version))
async def version() -> Response:
    """The release of this gateway."""
    return JsonAnswer({"version": __version__})


@router.get("/", responses=openapi.answer(Root))
async def root(request: Request) -> Response:
    """What this is."""
    return JsonAnswer({"name": "blockrelay", "version": __version__, "model": state.of(request).served.name})


@router.get(METRICS, response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus text; with BLOCKRELAY_METRICS_PORT at that port, and not here."""
    registry = await scrape.current_metrics(state.of(request).cells)
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/metrics/tenants", response_class=PlainTextResponse)
async def tenant_metrics(request: Request) -> Response:
    """Prometheus text, by API key: of the one that asks, of all where it is an operator's or keys are off."""
    gateway, tenant = state.of(request), authentication.of(request)
    of_all = Together(cell.links.tenants.registry for cell in gateway.cells)
    registry = of_all if sees_all(tenant) else OneTenant(of_all, tenant.name)
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


async def _status_events(
    listener: Listener, keep_alive_s: float, current_tenant: Callable[[], Tenant]
) -> AsyncIterator[bytes]:
    """Yields status events as server-sent events until the gateway ends or the client's API key is removed.

    A removed key gets the error as the last event. The context of `listener` must be open.
    `current_tenant` is called every KEY_CHECK_S seconds, so that the listener sees what the key may see now; it raises
    Unauthorized for a key that is gone.
    """
    yield sse.RETRY + sse.KEEP_ALIVE
    checked = written = time.monotonic()
    async for event in listener.events(min(keep_alive_s, policy.KEY_CHECK_S)):
        now = time.monotonic()
        if now - checked >= policy.KEY_CHECK_S:
            checked = now
            try:
                listener.tenant = current_tenant()
            except Unauthorized as error:
                yield sse.event(error_body(error))
                return
        if event is not None or now - written >= keep_alive_s:
            written = now
            yield sse.KEEP_ALIVE if event is None else sse.event(event)


def _plan(plan: Plan, workers: list[WorkerInfo]) -> dict[str, Any]:
    missing = missing_stages(plan, workers)
    ready = {worker.id for worker in workers if worker.state == "ready"}
    by_id = {worker.id: worker for worker in workers}
    stages = [
        {
            "stage": index,
            "blocks": f"{stage.first}-{stage.last}",
            "class": plan.blocks[f"block_{stage.first}"],
            "devices": plan.devices[index] if plan.devices else (),
            "workers": [
                {"id": worker_id, "ready": worker_id in ready, **_served(by_id.get(worker_id))}
                for worker_id, at in plan.assignments.items()
                if at == index
            ],
            "reason": plan.reasons[index],
        }
        for index, stage in enumerate(parse_split(plan.split))
    ]
    return {
        "epoch": plan.epoch,
        "source": plan.source,
        **_precision(folder_in_force(plan, workers)),
        "plan": plan.blocks,
        "stages": stages,
        "missing": missing,
    }


def _served(worker: WorkerInfo | None) -> dict[str, Any]:
    """Returns in which precision a worker serves its stage, with which KV pages; empty before it serves."""
    served = worker.served if worker is not None else None
    return {} if served is None else _precision(served)


def _precision(folder: ServedFolder | Manifest | None) -> dict[str, Any]:
    """Returns the precision of a block folder and the numbers in its KV pages; None where they are not known."""
    return {"precision": folder and folder.precision, "kv_cache_layout": folder and folder.kv_cache_layout}


async def _model(gateway: Gateway) -> dict[str, Any]:
    """Returns the model as `/v1/models` lists it, in the precision that is in force in the gateway's own cell."""
    manifest, model = gateway.served.folder.manifest, gateway.served.folder.model
    plan, workers = await gateway.cells.home.readiness.cell()
    return {
        "id": gateway.served.name,
        "object": "model",
        "created": int((gateway.served.folder.root / "manifest.json").stat().st_mtime),
        "owned_by": "blockrelay",
        "max_model_len": model.max_position,
        "context_length": model.max_position,
        "meta": {"n_ctx_train": model.max_position},
        **_precision(folder_in_force(plan, workers) if plan and plan.folder else manifest),
        "blocks": model.blocks,
        "model_hash": manifest.model_hash,
        "ignored_defaults": manifest.ignored_defaults,
        "chat": gateway.intake.reading.openai.template is not None,
        "structured_output": gateway.builder.structured.is_available,
    }

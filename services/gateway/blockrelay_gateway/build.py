"""Puts a gateway together from its parts."""

from secrets import token_hex

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import UsageError
from blockrelay.observability import logs
from blockrelay.observability.metrics.gateway import GatewayMetrics
from blockrelay.observability.metrics.tenants import TenantMetrics
from blockrelay.observability.registry import ServiceRegistry, service_registry
from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import AsyncScripts, connect_async
from blockrelay.redis.errors import RedisWatch
from blockrelay.settings import GatewaySettings, traces_wanted
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.admission.accept import Admission, Streaming
from blockrelay_gateway.admission.cell_watch import CellWatch
from blockrelay_gateway.admission.tensor_results import Results
from blockrelay_gateway.api.openai.chat_template import ChatTemplate
from blockrelay_gateway.api.openai.requests import OpenAIRequests
from blockrelay_gateway.api.operations.readiness import Readiness
from blockrelay_gateway.api.request_builder import RequestBuilder
from blockrelay_gateway.api.state import Gateway
from blockrelay_gateway.http.background import Background
from blockrelay_gateway.http.body_budget import BodyBudget, BodyTimeout
from blockrelay_gateway.http.errors import ErrorResponder
from blockrelay_gateway.streaming.following.abandonment import Abandonment
from blockrelay_gateway.streaming.following.accounting import Accounting
from blockrelay_gateway.streaming.following.followers import Followers
from blockrelay_gateway.streaming.following.registry import FollowedRequests
from blockrelay_gateway.streaming.following.repair import Repair
from blockrelay_gateway.streaming.following.resumption import Resumption
from blockrelay_gateway.streaming.log_tailer import Tailer
from blockrelay_gateway.streaming.records import Records
from blockrelay_gateway.streaming.status_events import StatusEvents
from blockrelay_gateway.tracing.ended_requests import EndedRequests, Traces

#: To each Redis, at most.
CONNECTIONS = 32


def build(settings: GatewaySettings, folder: BlockFolder) -> Gateway:
    """All parts, connected to nothing yet. Raises BlockFolderError for an unusable tokenizer or template,
    UsageError where traces are wanted and cannot be sent."""
    model, key = folder.model, folder.model_key
    tokenizer = Tokenizer.from_file(folder.tokenizer_path) if folder.tokenizer_path else None
    source = folder.chat_template()
    template = ChatTemplate(source, bos_token=model.bos_token, eos_token=model.eos_token) if source else None
    builder = RequestBuilder(
        name=settings.served_name(model.name),
        model=model,
        generation=folder.manifest.generation,
        tokenizer=tokenizer,
        default_max_tokens=settings.default_max_tokens,
    )
    metrics = GatewayMetrics(service_registry("gateway", cell=settings.cell, model=builder.name), blocks=model.blocks)
    tenants = TenantMetrics(ServiceRegistry({"cell": settings.cell, "model": builder.name}))
    watch = RedisWatch(metrics.redis_errors)
    name, keys = token_hex(8), Keys(settings.cell)
    client = connect_async(settings.redis_url, cell=settings.cell, connections=CONNECTIONS)
    payload = connect_async(
        settings.payload_redis_url or settings.redis_url, cell=settings.cell, connections=CONNECTIONS
    )
    scripts = AsyncScripts(client, keys)

    tailer = Tailer(client, keys, name, metrics, watch)
    records = Records(client, keys, key)
    followers = Followers(client, keys, scripts, name)
    abandonment = Abandonment(followers, scripts, watch, gateway=name, grace_s=settings.grace_s)
    traces = _traces(settings)
    ended = (
        EndedRequests(traces, client, keys, records, watch, model=builder.name, cell=settings.cell) if traces else None
    )
    accounting = Accounting(metrics, tenants, ended.ended if ended else None)
    followed = FollowedRequests(tailer, accounting, abandonment)
    resumption = Resumption(client, keys, records, followers, followed, model=key)
    repair = Repair(client, keys, scripts, tailer, records, followers, followed, watch, gateway=name)

    cell = CellWatch(client, scripts, followers, metrics, watch, settings)
    of_its_own = settings.payload_redis_url not in (None, settings.redis_url)
    results = Results(client, payload, keys, watch, of_its_own=of_its_own)
    admission = Admission(
        scripts,
        Streaming(followed=followed, followers=followers, records=records, resumption=resumption),
        cell,
        results,
        metrics,
        tenants,
        watch,
        gateway=name,
        model=key,
        blocks=model.blocks,
        settings=settings,
    )
    status_events = StatusEvents(client, keys, watch)
    works = {
        "tailer": tailer.run,
        "repair": repair.watch,
        "admission": cell.watch,
        "results": results.watch,
        "status events": status_events.run,
    }
    if ended is not None:
        works["traces"] = ended.run
    return Gateway(
        settings=settings,
        folder=folder,
        model_key=key,
        model_name=builder.name,
        tokenizer=tokenizer,
        builder=builder,
        openai=OpenAIRequests(builder, template),
        metrics=metrics,
        tenants=tenants,
        watch=watch,
        responder=ErrorResponder(metrics.rejections, metrics.limited),
        keys=keys,
        client=client,
        payload=payload,
        scripts=scripts,
        tailer=tailer,
        records=records,
        followed=followed,
        resumption=resumption,
        repair=repair,
        cell=cell,
        readiness=Readiness(client, keys, metrics, model=key, closing=lambda: followed.closing),
        results=results,
        status_events=status_events,
        admission=admission,
        body_timeout=BodyTimeout(settings.arrival_timeout_s),
        bodies=BodyBudget(max(settings.max_body_bytes, settings.max_bodies_bytes)),
        background=Background(works),
    )


def _traces(settings: GatewaySettings) -> Traces | None:
    """Where spans go, or None where nobody wants them. The SDK is an extra, and takes 12 MiB."""
    if not traces_wanted():
        return None
    try:
        from blockrelay_gateway.tracing.otlp import OtlpTraces
    except ModuleNotFoundError as error:
        what = "what sends traces is not installed: pip install 'blockrelay[otel]'"
        raise UsageError(f"OTEL_EXPORTER_OTLP_ENDPOINT is set, and {what}") from error
    return OtlpTraces(node=settings.node_id or logs.node_name("gateway"))

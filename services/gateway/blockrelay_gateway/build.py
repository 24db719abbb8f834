"""Puts a gateway together from its parts."""

import asyncio
from collections.abc import Sequence
from functools import partial

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.cell_list import cells_of
from blockrelay.errors import UsageError
from blockrelay.observability import logs
from blockrelay.observability.registry import service_registry
from blockrelay.settings import GatewaySettings, traces_wanted
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.api.infer.session_kv import served_kv
from blockrelay_gateway.api.openai.chat_template import ChatTemplate
from blockrelay_gateway.api.openai.requests import OpenAIRequests
from blockrelay_gateway.api.request_builder import RequestBuilder
from blockrelay_gateway.api.state import Gateway
from blockrelay_gateway.cells.build import build_cell
from blockrelay_gateway.cells.cell import ServedModel
from blockrelay_gateway.cells.cells import Cells
from blockrelay_gateway.cells.submission import Submission
from blockrelay_gateway.http.body_budget import BodyBudget, BodyTimeout
from blockrelay_gateway.http.errors import ErrorResponder
from blockrelay_gateway.tracing.ended_requests import Traces


def build(settings: GatewaySettings, folder: BlockFolder, *, tenants: Sequence[str]) -> Gateway:
    """All parts, connected to nothing yet; `tenants` are the names of all there are.

    Raises BlockFolderError for an unusable tokenizer or template, UsageError for an unusable file of cells, or where
    traces are wanted and cannot be sent.
    """
    model = folder.model
    tokenizer = Tokenizer.from_file(folder.tokenizer_path) if folder.tokenizer_path else None
    source = folder.chat_template()
    template = ChatTemplate(source, special_tokens=model.template_tokens) if source else None
    builder = RequestBuilder(
        name=settings.served_name(model.name),
        model=model,
        generation=folder.manifest.generation,
        tokenizer=tokenizer,
        default_max_tokens=settings.default_max_tokens,
        max_tokens_limit=settings.max_tokens_limit,
    )
    served = ServedModel(folder=folder, key=folder.model_key, name=builder.name, tokenizer=tokenizer)
    traces = _traces(settings)
    cells = _cells(settings, served, traces, tenants)
    own = cells.home.metrics
    retention_s, replicas = settings.keyed_retention_s, settings.accept_replicas
    return Gateway(
        settings=settings,
        served=served,
        kv=served_kv(folder),
        builder=builder,
        openai=OpenAIRequests(builder, template),
        responder=ErrorResponder(own.rejections, own.limited),
        cells=cells,
        submission=Submission(cells, retention_s=retention_s, replicas=replicas),
        traces=traces,
        body_timeout=BodyTimeout(settings.arrival_timeout_s),
        bodies=BodyBudget(max(settings.max_body_bytes, settings.max_bodies_bytes)),
    )


def _cells(settings: GatewaySettings, served: ServedModel, traces: Traces | None, tenants: Sequence[str]) -> Cells:
    broken = asyncio.Event()
    found = cells_of(settings)
    home = found.home(settings.cell)
    make = partial(build_cell, served=served, settings=settings, traces=traces, broken=broken, names=tenants)
    return Cells(
        found,
        make,
        make(found.places[home], registry=service_registry("gateway", cell=home, model=served.name)),
        path=settings.cells,
        retention_s=settings.keyed_retention_s,
        broken=broken,
    )


def _traces(settings: GatewaySettings) -> Traces | None:
    """Where spans go, or None where nobody wants them. The SDK is an extra, and takes 12 MiB."""
    if not traces_wanted():
        return None
    try:
        from blockrelay_gateway.tracing.otlp import OtlpTraces
    except ModuleNotFoundError as error:
        what = "what sends traces is not installed: install blockrelay[otel]"
        raise UsageError(f"OTEL_EXPORTER_OTLP_ENDPOINT is set, and {what}") from error
    return OtlpTraces(node=settings.node_id or logs.node_name("gateway"))

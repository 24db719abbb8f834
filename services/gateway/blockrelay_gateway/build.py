"""Builds a gateway from its parts."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.cell_list import cells_of
from blockrelay.errors import UsageError
from blockrelay.extras import how_to_install
from blockrelay.host.memory import available_bytes
from blockrelay.observability import logs
from blockrelay.observability.registry import service_registry
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.api.intake import BodyIntake
from blockrelay_gateway.api.reading import reading_of
from blockrelay_gateway.api.state import Gateway
from blockrelay_gateway.cells.cell import Cell, ServedModel
from blockrelay_gateway.cells.cells import Cells
from blockrelay_gateway.cells.submission import Submission
from blockrelay_gateway.cells.waiting_room import WaitingRoom
from blockrelay_gateway.draining.drain import Drain
from blockrelay_gateway.helpers.pool import Helpers
from blockrelay_gateway.http.body_budget import BodyBudget, BodyTimeout
from blockrelay_gateway.http.errors import ErrorResponder
from blockrelay_gateway.policy import BODIES_DIVISOR, MAX_BODIES_BYTES
from blockrelay_gateway.streaming.active_requests.active_request import ActiveRequest
from blockrelay_gateway.tracing.ended_requests import Traces
from blockrelay_gateway.tracing.wanted import traces_wanted

#: Is called with each request that ends.
Ended = Callable[[ActiveRequest], None]


def build(settings: GatewaySettings, folder: BlockFolder, *, tenants: Sequence[str]) -> Gateway:
    """Builds all parts of a gateway; nothing is connected yet. `tenants` are the names of all tenants.

    Raises BlockFolderError for an unusable tokenizer or template. Raises UsageError for an unusable file of cells or
    Redis URL, and if traces are wanted and cannot be sent.
    """
    reading = reading_of(settings, folder)
    reading.builder.structured.prepare()
    served = ServedModel(folder=folder, name=reading.builder.name, tokenizer=reading.builder.tokenizer)
    traces = _traces(settings)
    drain = Drain()
    ended: list[Ended] = []
    cells = _cells(settings, served, traces, tenants, drain, ended)
    own = cells.home.links.metrics
    room = WaitingRoom(drain, own)
    ended.append(lambda active: room.ended(active.tenant))
    retention_s, replicas = settings.keyed_retention_s, settings.accept_replicas
    return Gateway(
        settings=settings,
        served=served,
        intake=BodyIntake(settings, reading, Helpers(settings.body_helpers)),
        responder=ErrorResponder(own),
        cells=cells,
        drain=drain,
        submission=Submission(cells, room, retention_s=retention_s, replicas=replicas),
        traces=traces,
        body_timeout=BodyTimeout(settings.arrival_timeout_s),
        bodies=BodyBudget(
            settings.max_bodies_bytes or min(MAX_BODIES_BYTES, available_bytes() // BODIES_DIVISOR),
            largest_body=settings.max_body_bytes,
        ),
    )


def _cells(
    settings: GatewaySettings,
    served: ServedModel,
    traces: Traces | None,
    tenants: Sequence[str],
    drain: Drain,
    ended: Sequence[Ended],
) -> Cells:
    broken = asyncio.Event()
    cells = cells_of(settings)
    home = cells.home(settings.cell)
    make = partial(
        Cell, served=served, settings=settings, traces=traces, broken=broken, drain=drain, names=tenants,
        ended=ended,
    )  # fmt: skip
    return Cells(
        cells,
        make,
        make(cells.places[home], registry=service_registry("gateway", cell=home, model=served.name)),
        path=settings.cells,
        retention_s=settings.keyed_retention_s,
        broken=broken,
    )


def _traces(settings: GatewaySettings) -> Traces | None:
    """The exporter of spans; None if no traces are wanted. OpenTelemetry's SDK is an extra and takes 12 MiB.

    Raises UsageError if traces are wanted and the SDK is not installed, and for a wrong endpoint or protocol.
    """
    if not traces_wanted():
        return None
    try:
        from blockrelay_gateway.tracing.otlp import OtlpTraces
    except ModuleNotFoundError as error:
        what = f"what sends traces is not installed: {how_to_install('otel')}"
        raise UsageError(f"OTEL_EXPORTER_OTLP_ENDPOINT is set, and {what}") from error
    return OtlpTraces(node=settings.node_id or logs.node_name("gateway"))

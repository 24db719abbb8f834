"""The parts of a gateway that the routes of all APIs share, built once by `build`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from blockrelay.settings import GatewaySettings
from blockrelay_gateway.api.infer.session_kv import ServedKv
from blockrelay_gateway.api.intake import BodyIntake
from blockrelay_gateway.api.request_builder import RequestBuilder
from blockrelay_gateway.cells.cell import ServedModel
from blockrelay_gateway.cells.cells import Cells
from blockrelay_gateway.cells.submission import Submission
from blockrelay_gateway.draining.course import Phase
from blockrelay_gateway.draining.drain import Drain
from blockrelay_gateway.http.body_budget import BodyBudget, BodyTimeout
from blockrelay_gateway.http.errors import ErrorResponder
from blockrelay_gateway.tracing.ended_requests import Traces


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The parts of one gateway; those of a single cell are in `cells`."""

    settings: GatewaySettings
    served: ServedModel
    intake: BodyIntake
    responder: ErrorResponder
    cells: Cells
    drain: Drain
    submission: Submission
    traces: Traces | None
    """The exporter of spans; None: no traces are sent."""
    body_timeout: BodyTimeout
    bodies: BodyBudget

    @property
    def kv(self) -> ServedKv:
        """Shape and layers of the model's KV."""
        return self.intake.reading.kv

    @property
    def builder(self) -> RequestBuilder:
        """The builder of requests for the served model."""
        return self.intake.reading.builder

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the background work of all cells while the context is open; it may be opened once.

        At the end it enters the phase CUTTING, closes the connections to Redis, and sends the spans that are left.
        """
        try:
            async with self.cells.running():
                try:
                    yield
                finally:
                    self.enter(Phase.CUTTING)
        finally:
            if self.traces is not None:
                await self.traces.close()

    def enter(self, phase: Phase) -> None:
        """Begins a phase of the gateway's end.

        Nothing is kept for room any longer. FINISHING ends streams that would never end by themselves. CUTTING also
        stops waiting for readers and bodies. Accepted requests go on at the workers.
        """
        self.drain.enter(phase)
        self.submission.gateway_ends()
        if phase >= Phase.FINISHING:
            self.cells.end_status_events()
        if phase >= Phase.CUTTING:
            self.cells.close()
            self.body_timeout.close()


def of(connection: HTTPConnection) -> Gateway:
    """The gateway that serves `connection`."""
    gateway = connection.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway

"""What a gateway tells Prometheus: at the clients' port, or at one for metrics alone (BLOCKRELAY_METRICS_PORT)."""

import asyncio
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Metric

from blockrelay.errors import UsageError
from blockrelay.observability import logs
from blockrelay.observability.registry import Together
from blockrelay.observability.status_server import DEADLINE_S, StatusServer
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.cells.cells import Cells


async def told(cells: Cells) -> Together:
    """The metrics of all cells, with their gauges as they are now."""
    await asyncio.gather(*(cell.readiness.tell_metrics() for cell in cells))
    for cell in cells:
        cell.metrics.cell_list_version.set(cells.version)
    return Together(cell.metrics.registry for cell in cells)


class Scrape(CollectorRegistry):
    """The same for threads of a status server: it is read on the gateway's event loop, to which all of it belongs."""

    def __init__(self, cells: Cells) -> None:
        super().__init__()
        self._cells = cells
        self._loop: Future[asyncio.AbstractEventLoop] = Future()

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Answers scrapes for as long as the block runs, on this event loop. Before and after it a scrape times out."""
        self._loop.set_result(asyncio.get_running_loop())
        try:
            yield
        finally:
            self._loop = Future()

    def collect(self) -> Iterable[Metric]:
        """All metrics, freshly read. Raises TimeoutError when the event loop has no time, or is not there."""
        loop = self._loop.result(DEADLINE_S)
        return asyncio.run_coroutine_threadsafe(self._read(), loop).result(DEADLINE_S)

    async def _read(self) -> list[Metric]:
        return list((await told(self._cells)).collect())


def metrics_port(settings: GatewaySettings, scrape: Scrape) -> StatusServer | None:
    """The port for metrics alone, open from now on; None where they are told at the clients' port.

    Raises UsageError when it cannot be had.
    """
    if settings.metrics_port is None:
        return None
    try:
        server = StatusServer(settings.host, settings.metrics_port, scrape)
    except OSError as error:
        where = f"{settings.host}:{settings.metrics_port} (BLOCKRELAY_METRICS_PORT)"
        raise UsageError(f"cannot listen on {where}: {error.strerror or error}") from error
    logs.get().info("METRICS_LISTENING", host=settings.host, port=server.port)
    return server

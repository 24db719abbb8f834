"""The gateway's metrics for Prometheus, on the clients' port or on one of their own (BLOCKRELAY_METRICS_PORT)."""

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


async def current_metrics(cells: Cells) -> Together:
    """Returns the metrics of all cells, after setting their gauges to the current values."""
    await asyncio.gather(*(cell.readiness.set_gauges() for cell in cells))
    for cell in cells:
        cell.links.metrics.cell_list_version.set(cells.version)
    return Together(cell.links.metrics.registry for cell in cells)


class Scrape(CollectorRegistry):
    """The metrics of all cells for the threads of a status server.

    They are read on the gateway's event loop, because the cells belong to it.
    """

    def __init__(self, cells: Cells) -> None:
        super().__init__()
        self._cells = cells
        self._loop: Future[asyncio.AbstractEventLoop] = Future()

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Answers scrapes on this event loop while the context is open. Before and after it a scrape times out.

        Only one context may be open at a time.
        """
        self._loop.set_result(asyncio.get_running_loop())
        try:
            yield
        finally:
            self._loop = Future()

    def collect(self) -> Iterable[Metric]:
        """Reads all metrics on the event loop of `answered`. Other threads call it and wait; the loop's own must not.

        Raises TimeoutError if no `answered` context opens within DEADLINE_S seconds, or if reading takes as long again.
        """
        loop = self._loop.result(DEADLINE_S)
        return asyncio.run_coroutine_threadsafe(self._read(), loop).result(DEADLINE_S)

    async def _read(self) -> list[Metric]:
        return list((await current_metrics(self._cells)).collect())


def metrics_port(settings: GatewaySettings, scrape: Scrape) -> StatusServer | None:
    """Opens the port for metrics alone, which the caller closes; None if they are served on the clients' port.

    Raises UsageError if the port cannot be opened.
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

"""A worker's connections to a cell."""

import threading

import redis
from prometheus_client import CollectorRegistry

from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.redis.errors import RedisWatch
from blockrelay_worker.transport.redis_links import Links
from tests.support.cell import Cell


def links_of(
    cell: Cell,
    *,
    metrics: WorkerMetrics | None = None,
    payload: redis.Redis | None = None,
    stop: threading.Event | None = None,
) -> Links:
    """Returns links to the Redis of `cell`, and to `payload` if it is another one; errors are counted in `metrics`."""
    watch = RedisWatch((metrics or WorkerMetrics(CollectorRegistry())).redis_errors)
    return Links(cell.client, payload or cell.client, cell.keys, cell.scripts, watch, stop or threading.Event())

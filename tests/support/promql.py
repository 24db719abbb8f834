"""Queries of dashboards and alerts: with what Grafana fills in, and taken apart."""

import re
from collections.abc import Iterator
from typing import Any, cast

import promql_parser
from prometheus_client import CollectorRegistry

from blockrelay.observability.certificates import Certificates
from blockrelay.observability.metrics.gateway import GatewayMetrics
from blockrelay.observability.metrics.scheduler import SchedulerMetrics
from blockrelay.observability.metrics.tenants import TenantMetrics
from blockrelay.observability.metrics.whose import taken
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.observability.registry import service_registry
from blockrelay.observability.sensors import Sensors

#: What the Redis exporter tells, of all that it does: tests/observability asks a real one.
EXPORTED = (
    "redis_up",
    "redis_aof_last_write_status",
    "redis_aof_last_bgrewrite_status",
    "redis_rdb_last_bgsave_status",
    "redis_master_link_up",
    "redis_connected_slave_lag_seconds",
    "redis_commands_duration_seconds_total",
    "redis_commands_processed_total",
    "redis_memory_used_bytes",
    "redis_memory_max_bytes",
    "redis_aof_current_size_bytes",
    "redis_connected_clients",
    "redis_blocked_clients",
)
#: What the kubelet tells of volumes.
KUBELET = {
    f"kubelet_volume_stats_{what}_bytes": {"namespace", "persistentvolumeclaim"} for what in ("available", "capacity")
}
#: What cert-manager tells of its certificates.
CERT_MANAGER = {"certmanager_certificate_expiration_timestamp_seconds": {"namespace", "name"}}
#: Over how much of the past a rate is taken where a test asks.
RATE_INTERVAL = "15s"
_SUFFIXES = ("", "_total", "_info", "_bucket", "_sum", "_count")


def filled_in(expr: str, interval: str = RATE_INTERVAL) -> str:
    """`expr` for all cells, models and Redis servers."""
    return re.sub(r"\$(cell|model|redis)\b", ".+", expr.replace("$__rate_interval", interval))


def registered() -> dict[str, set[str]]:
    """Every name that a query may have -> the labels of its series."""
    registry = service_registry("any", cell="c0", model="m")
    collectors: list[Any] = []
    for group in (GatewayMetrics, SchedulerMetrics, TenantMetrics, WorkerMetrics):
        own = CollectorRegistry()
        group(own)
        collectors += cast(Any, own)._collector_to_names
    for add in (lambda own: Sensors(own, list), lambda own: Certificates(own, {}, {})):
        add(own := CollectorRegistry())
        collectors += cast(Any, own)._collector_to_names
    collectors += cast(Any, registry)._collector_to_names
    found: dict[str, set[str]] = {name: {"job", "instance"} for name in EXPORTED}
    for collector in collectors:
        for family in collector.collect():
            labels = {*(getattr(collector, "_labelnames", ()) or getattr(family, "_labelnames", ()))}
            labels |= {label for sample in family.samples for label in sample.labels}
            for suffix in _SUFFIXES:
                found[family.name + suffix] = labels | {"cell", "model", "job", "instance", "le"}
    return found


def selectors(node: Any) -> Iterator[Any]:
    """Every vector selector below a node of the syntax tree."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("vector_selector", "expr", "lhs", "rhs", "vs"):
        if (below := getattr(node, name, None)) is not None:
            yield from selectors(below)
    for below in getattr(node, "args", None) or ():
        yield from selectors(below)


def misread(tree: Any) -> list[str]:
    """Metrics of the cell that a query adds up over processes, and of processes of which it takes the largest."""
    how = {f"{name}{suffix}": take for name, take in _takes().items() for suffix in _SUFFIXES}
    return [
        f"{name}: {asked}, not {how[name]}"
        for name, asked, by in aggregated(tree)
        if name in how and "instance" not in by
        if asked not in {"max": ("max", "min"), "sum": ("sum", "count", "")}[how[name]]
    ]


def aggregated(node: Any, by: str = "", labels: tuple[str, ...] = ()) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Each metric below a node, the aggregation that it is in, and the labels that this keeps."""
    if isinstance(node, promql_parser.VectorSelector):
        yield str(node.name), by, labels
    if isinstance(node, promql_parser.AggregateExpr):
        by, labels = str(node.op), tuple(getattr(node.modifier, "labels", None) or ())
    for name in ("vector_selector", "expr", "lhs", "rhs", "vs"):
        if (below := getattr(node, name, None)) is not None:
            yield from aggregated(below, by, labels)
    for below in getattr(node, "args", None) or ():
        yield from aggregated(below, by, labels)


def _takes() -> dict[str, str]:
    """Each family of ours -> how it is taken; build information is the same of all who have it."""
    found: dict[str, str] = {}
    for group in (GatewayMetrics, SchedulerMetrics, TenantMetrics, WorkerMetrics):
        group(registry := CollectorRegistry())
        found |= {family.name: taken(family.name, family.type) for family in registry.collect()}
    return found


def grouped_by(node: Any) -> Iterator[str]:
    modifier = getattr(node, "modifier", None)
    yield from getattr(modifier, "labels", None) or ()
    for name in ("expr", "lhs", "rhs"):
        if (below := getattr(node, name, None)) is not None:
            yield from grouped_by(below)
    for below in getattr(node, "args", None) or ():
        yield from grouped_by(below)

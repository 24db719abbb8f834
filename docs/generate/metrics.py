"""docs/metrics.md, from the instruments."""

from collections.abc import Callable
from typing import Any, cast

from prometheus_client import CollectorRegistry

from blockrelay.observability.metrics import GatewayMetrics, SchedulerMetrics, WorkerMetrics
from blockrelay.observability.registry import service_registry
from docs.generate.tables import table

_HEAD = """\
# Metrics

Every service answers `GET /metrics` with Prometheus text. Names follow vLLM's where the meaning is the same, with our
prefix. Units are in the names. Where gateway and worker share a name (tokens, running, waiting), the gateway counts
what clients asked for and got, and the worker what it computed, re-runs included: do not add them up.

A counter has `_total` behind its name; a histogram has `_bucket`, `_sum` and `_count`.
"""
_GROUPS: dict[str, Callable[[CollectorRegistry], object]] = {
    "Gateway": GatewayMetrics,
    "Scheduler": SchedulerMetrics,
    "Worker": WorkerMetrics,
}


def page() -> str:
    """The whole page."""
    registries = {"Every service": service_registry("any")}
    for title, group in _GROUPS.items():
        registries[title] = CollectorRegistry()
        group(registries[title])
    return _HEAD + "".join(f"\n## {title}\n\n{_rows(registry)}" for title, registry in registries.items())


def _rows(registry: CollectorRegistry) -> str:
    collectors: Any = cast(Any, registry)._collector_to_names
    rows = sorted(_row(collector, family) for collector in collectors for family in collector.collect())
    return table(("metric", "type", "labels", "meaning"), rows)


def _row(collector: Any, family: Any) -> tuple[str, str, str, str]:
    of_samples = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
    labels = getattr(collector, "_labelnames", ()) or getattr(family, "_labelnames", ()) or of_samples
    suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
    return (
        f"`{family.name}{suffix}`",
        family.type,
        ", ".join(f"`{label}`" for label in labels),
        family.documentation,
    )

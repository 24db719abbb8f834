"""docs/metrics.md, from the instruments."""

from collections.abc import Callable, Iterable
from typing import Any, cast

from prometheus_client import CollectorRegistry

from blockrelay.observability.certificates import Certificates
from blockrelay.observability.metrics.gateway import GatewayMetrics
from blockrelay.observability.metrics.scheduler import SchedulerMetrics
from blockrelay.observability.metrics.tenants import TenantMetrics
from blockrelay.observability.metrics.whose import BOOKS, taken
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.observability.registry import service_registry
from blockrelay.observability.sensors import Sensors
from docs.generate.tables import table

_HEAD = """\
# Metrics

For operators who write queries, dashboards or alerts of their own.

Every service answers `GET /metrics` with Prometheus text. Names follow vLLM's where the meaning is the same, with our
prefix, and end with their unit. A counter has `_total` behind its name; a histogram has `_bucket`, `_sum` and `_count`.

The name says whose it is, and the column *take* how to add it up over processes:

- `blockrelay_worker_...`, `blockrelay_gateway_...`: of one process. A gateway counts what clients asked for and got, a
  worker what it computed, re-runs included.
- Any other counter or histogram means the same wherever it comes from: add up all processes.
- Any other gauge is of the whole cell, and every process reports the same: take the maximum,
  `max by (cell, model) (blockrelay_requests_in_flight)`. So are the counters that Redis keeps, BOOKS: take the
  maximum of their rates. No process's end sets them back, and what was accepted has ended or is in flight.

Every series of ours has the labels `cell` and `model` (the name that clients use: give all services of a cell the same
`BLOCKRELAY_MODEL_NAME`, or none). A counter's labels come from closed lists, below, and each of its series is there
from the start.

`GET /metrics/tenants` of a gateway shows, with an API key, what that key used, with an operator's key what each used. A
Prometheus needs an operator's key for it (`authorization` of its scrape configuration).
"""
_GROUPS: dict[str, Callable[[CollectorRegistry], object]] = {
    "Gateway": GatewayMetrics,
    "Gateway, by API key": TenantMetrics,
    "Scheduler": SchedulerMetrics,
    "Scheduler with Redis over TLS": lambda registry: Certificates(registry, {}, {}),
    "Worker": WorkerMetrics,
    "Worker with a GPU": lambda registry: Sensors(registry, list),
}


def page() -> str:
    """The whole page."""
    registries: dict[str, CollectorRegistry] = {"Every service": service_registry("any", cell="c0", model="any")}
    for title, group in _GROUPS.items():
        registries[title] = CollectorRegistry()
        group(registries[title])
    tables = "".join(f"\n## {title}\n\n{_rows(registry)}" for title, registry in registries.items())
    head = _HEAD.replace("BOOKS", ", ".join(f"`{name}_total`" for name in BOOKS))
    return head + tables + f"\n## Values of labels\n\n{_values(registries.values())}"


def _rows(registry: CollectorRegistry) -> str:
    collectors: Any = cast(Any, registry)._collector_to_names
    rows = sorted(_row(collector, family) for collector in collectors for family in collector.collect())
    return table(("metric", "type", "labels", "take", "meaning"), rows)


def _values(registries: Iterable[CollectorRegistry]) -> str:
    """What stands in the series that are there from the start."""
    found: dict[tuple[str, str], None] = {}
    for family in (family for registry in registries for family in registry.collect()):
        if not family.name.startswith("blockrelay_") or family.type == "info":
            continue
        for label in sorted({label for sample in family.samples for label in sample.labels} - {"le"}):
            values = dict.fromkeys(sample.labels[label] for sample in family.samples)
            found[label, ", ".join(f"`{value}`" for value in values)] = None
    return table(("label", "values"), list(found))


def _row(collector: Any, family: Any) -> tuple[str, ...]:
    of_samples = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
    labels = getattr(collector, "_labelnames", ()) or getattr(family, "_labelnames", ()) or of_samples
    suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
    return (
        f"`{family.name}{suffix}`",
        family.type,
        ", ".join(f"`{label}`" for label in labels),
        taken(family.name, family.type),
        family.documentation,
    )

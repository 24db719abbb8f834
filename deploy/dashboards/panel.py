"""What a dashboard is made of, and the queries that most panels are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

#: Units as Grafana calls them.
Unit = Literal["short", "s", "bytes", "Bps", "percentunit", "reqps", "ops", "cps", "celsius", "watt", "none"]
Kind = Literal["graph", "number", "heat map"]
Cause = Literal[
    "load", "overload", "crowd", "prefixes", "tenants", "kill", "gpu", "device", "poison", "numerics", "redis", "tiers",
    "memory", "books", "rewrite",
]  # fmt: skip
#: What changes a panel's value (done by tests/support/systems/causes.py), in words.
CAUSES: dict[Cause, str] = {
    "load": "many requests",
    "prefixes": "prompts that begin alike",
    "tenants": "requests with an API key, beyond its limit",
    "overload": "more requests than may be in flight, and a client that leaves",
    "crowd": "more requests than KV pages hold",
    "kill": "`kill -9` of all workers of a stage",
    "gpu": "a GPU that fails",
    "device": "`kill -9` of a GPU's process, again and again",
    "poison": "a request that cannot be computed",
    "numerics": "no worker of a numerics id is left",
    "memory": "Redis is full",
    "books": "requests in the books that nobody knows",
    "tiers": "a tier of the page store goes away",
    "rewrite": "the process that rewrites the append-only file is killed",
    "redis": "both Redis go away",
}
#: What has a value only where a GPU has sensors that its driver tells of: asked for on no machine without one.
NEEDS_HARDWARE = (
    "blockrelay_worker_gpu_utilisation_ratio",
    "blockrelay_worker_gpu_temperature_celsius",
    "blockrelay_worker_gpu_power_watts",
)
#: A choice that a dashboard offers -> where its values are.
VARIABLES = {
    "cell": "label_values(blockrelay_build_info, cell)",
    "model": "label_values(blockrelay_build_info, model)",
    "redis": 'label_values(redis_up{job="blockrelay-redis"}, instance)',
}
#: Of the cell's dashboards. Series of what was renamed, which have no `model`, are not meant.
SELECTED = 'cell=~"$cell", model=~"$model"'


@dataclass(frozen=True, slots=True)
class Query:
    """`legend` as Grafana fills it in: `{{label}}`."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """What people look at. `meaning` is what they read beside it; `cause` changes its value.

    A heat map has one query: how many values a histogram has got, by its bounds (`heat`).
    """

    title: str
    meaning: str
    queries: Sequence[Query]
    cause: Cause
    unit: Unit = "short"
    kind: Kind = "graph"

    @property
    def needs_hardware(self) -> bool:
        return any(name in query.expr for query in self.queries for name in NEEDS_HARDWARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """Rows of panels under a heading. `variables`: what can be chosen, which every query takes to heart."""

    name: str
    title: str
    rows: Sequence[tuple[str, Sequence[Panel]]]
    variables: Sequence[str] = ("cell", "model")

    @property
    def panels(self) -> list[Panel]:
        return [panel for _, panels in self.rows for panel in panels]


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""


def _selected(more: str) -> str:
    return f"{{{SELECTED}{', ' + more if more else ''}}}"


def rate(metric: str, by: str = "", *, where: str = "") -> str:
    """Per second, of a counter that is summed over processes."""
    return f"sum{_by(by)} (rate({metric}{_selected(where)}[$__rate_interval]))"


def increase(metric: str, by: str = "", *, where: str = "") -> str:
    """How many in the interval between two points of the graph."""
    return f"sum{_by(by)} (increase({metric}{_selected(where)}[$__rate_interval]))"


def of_cell(metric: str, by: str = "", *, where: str = "") -> str:
    """A gauge of the cell, which every process that tells it tells alike."""
    return f"max{_by(by)} ({metric}{_selected(where)})"


def of_processes(metric: str, by: str = "", *, where: str = "") -> str:
    """A gauge that is summed over processes."""
    return f"sum{_by(by)} ({metric}{_selected(where)})"


def of_cell_rate(metric: str, by: str = "") -> str:
    """Per second, of a counter that Redis keeps and every scheduler tells alike."""
    return f"max{_by(by)} (rate({metric}{_selected('')}[$__rate_interval]))"


def of_cell_increase(metric: str, by: str = "") -> str:
    """How many in the interval between two points of the graph, of a counter that Redis keeps."""
    return f"max{_by(by)} (increase({metric}{_selected('')}[$__rate_interval]))"


def quantile(share: float, metric: str, by: str = "") -> str:
    """The query for a quantile of a histogram, over all processes."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({share}, {rate(metric + '_bucket', labels)})"


def quantiles(metric: str) -> tuple[Query, ...]:
    """The usual three."""
    return tuple(Query(quantile(share, metric), f"p{100 * share:.0f}") for share in (0.5, 0.9, 0.99))


def heat(metric: str) -> tuple[Query]:
    """Of a histogram, over all processes: how many values came in the interval, up to each bound."""
    return (Query(increase(f"{metric}_bucket", "le"), "{{le}}"),)


def errors() -> Query:
    """The share of requests that ended in an error of ours: a 5xx, or `error`."""
    refused, ended = "blockrelay_admission_rejections_total", "blockrelay_finished_requests_total"
    every, ours = 'status=~"5.."', 'finished_reason="error"'

    def both(more: str) -> str:
        first, second = (f"rate({name}[$__rate_interval])" for name in (refused + _selected(every), ended + more))
        return f"sum ({first} or {second})"

    return Query(f"{both(_selected(ours))} / {both(_selected(''))}", "errors")


def mean(metric: str, by: str = "") -> str:
    """Of a histogram or a summary, over all processes, in the interval."""
    return f"{rate(metric + '_sum', by)} / {rate(metric + '_count', by)}"

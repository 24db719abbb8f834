"""The parts of a dashboard as data, and functions for the Prometheus queries of most panels.

In these functions `metric` is the full name of a metric (of a histogram or summary without `_bucket`, `_sum`,
`_count`). `by` has the labels of the series to show, separated by commas; empty: one series. `where` has further
conditions on labels, such as `device="gpu"`. The interval is Grafana's `$__rate_interval` before each point of a graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

#: Units, by Grafana's names.
Unit = Literal["short", "s", "bytes", "Bps", "percentunit", "reqps", "ops", "cps", "celsius", "watt", "none"]
Kind = Literal["graph", "number", "heat map"]
Cause = Literal[
    "load", "overload", "crowd", "prefixes", "tenants", "kill", "gpu", "device", "poison", "numerics", "redis", "tiers",
    "memory", "books", "rewrite",
]  # fmt: skip
#: The events that change the values of panels, in words; tests/support/systems/causes.py makes them happen.
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
    "books": "the accounting has requests that do not exist",
    "tiers": "a tier of the page store goes away",
    "rewrite": "the process that rewrites the append-only file is killed",
    "redis": "both Redis go away",
}
#: Metrics that exist only for a GPU whose driver reports its sensors: tests without such a GPU expect no values.
NEEDS_HARDWARE = (
    "blockrelay_worker_gpu_utilisation_ratio",
    "blockrelay_worker_gpu_temperature_celsius",
    "blockrelay_worker_gpu_power_watts",
)
#: Grafana's query for the values of each variable that the user of a dashboard may choose.
VARIABLES = {
    "cell": "label_values(blockrelay_build_info, cell)",
    "model": "label_values(blockrelay_build_info, model)",
    "redis": 'label_values(redis_up{job="blockrelay-redis"}, instance)',
}
#: The label matchers that select the chosen cells and models.
SELECTED = 'cell=~"$cell", model=~"$model"'


@dataclass(frozen=True, slots=True)
class Query:
    """A Prometheus query and the legend of its series."""

    expr: str
    legend: str = ""
    """The legend with labels as Grafana fills them in, `{{label}}`; empty: Grafana chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel of a dashboard. A heat map has one query, made by `heat`."""

    title: str
    meaning: str
    """The description that Grafana shows beside the title."""
    queries: Sequence[Query]
    cause: Cause
    """An event that changes the panel's value; a test makes it happen."""
    unit: Unit = "short"
    kind: Kind = "graph"

    @property
    def needs_hardware(self) -> bool:
        """True if the panel has values only where a GPU reports its sensors."""
        return any(name in query.expr for query in self.queries for name in NEEDS_HARDWARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """A Grafana dashboard."""

    name: str
    """The name of its file and the end of its uid."""
    title: str
    rows: Sequence[tuple[str, Sequence[Panel]]]
    """Each row's heading and panels."""
    variables: Sequence[str] = ("cell", "model")
    """The variables that its user may choose, keys of VARIABLES; every query uses all of them."""

    @property
    def panels(self) -> list[Panel]:
        """The panels of all rows."""
        return [panel for _, panels in self.rows for panel in panels]


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""


def _selected(more: str) -> str:
    return f"{{{SELECTED}{', ' + more if more else ''}}}"


def rate(metric: str, by: str = "", *, where: str = "") -> str:
    """The query for the rate per second of a counter, summed over processes."""
    return f"sum{_by(by)} (rate({metric}{_selected(where)}[$__rate_interval]))"


def increase(metric: str, by: str = "", *, where: str = "") -> str:
    """The query for the increase of a counter in the interval, summed over processes."""
    return f"sum{_by(by)} (increase({metric}{_selected(where)}[$__rate_interval]))"


def of_cell(metric: str, by: str = "", *, where: str = "") -> str:
    """The query for a gauge of the whole cell, which several processes export with the same value."""
    return f"max{_by(by)} ({metric}{_selected(where)})"


def of_processes(metric: str, by: str = "", *, where: str = "") -> str:
    """The query for a gauge that is summed over processes."""
    return f"sum{_by(by)} ({metric}{_selected(where)})"


def of_cell_rate(metric: str, by: str = "") -> str:
    """The query for the rate per second of a counter kept in Redis, which all schedulers export with the same value."""
    return f"max{_by(by)} (rate({metric}{_selected('')}[$__rate_interval]))"


def of_cell_increase(metric: str, by: str = "", *, where: str = "") -> str:
    """The query for the increase in the interval of a counter kept in Redis, as for `of_cell_rate`."""
    return f"max{_by(by)} (increase({metric}{_selected(where)}[$__rate_interval]))"


def quantile(share: float, metric: str, by: str = "") -> str:
    """The query for a quantile of a histogram, over all processes; `share` is 0.5 for the median."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({share}, {rate(metric + '_bucket', labels)})"


def quantiles(metric: str) -> tuple[Query, ...]:
    """Queries for the 50th, 90th and 99th percentile of a histogram, over all processes."""
    return tuple(Query(quantile(share, metric), f"p{100 * share:.0f}") for share in (0.5, 0.9, 0.99))


def heat(metric: str) -> tuple[Query]:
    """The query of a heat map: how many values a histogram got in the interval, up to each bound."""
    return (Query(increase(f"{metric}_bucket", "le"), "{{le}}"),)


def errors() -> Query:
    """The query for the share of requests that failed by an error of the service: a 5xx, or an end by `error`."""
    refused, ended = "blockrelay_admission_rejections_total", "blockrelay_finished_requests_total"
    every, ours = 'status=~"5.."', 'finished_reason="error"'

    def both(more: str) -> str:
        first, second = (f"rate({name}[$__rate_interval])" for name in (refused + _selected(every), ended + more))
        return f"sum ({first} or {second})"

    return Query(f"{both(_selected(ours))} / {both(_selected(''))}", "errors")


def mean(metric: str, by: str = "") -> str:
    """The query for the mean of a histogram or a summary in the interval, over all processes."""
    return f"{rate(metric + '_sum', by)} / {rate(metric + '_count', by)}"

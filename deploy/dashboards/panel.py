"""What a dashboard is made of, and the queries that most panels are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

#: Units as Grafana calls them.
Unit = Literal["short", "s", "bytes", "percentunit", "reqps", "ops", "cps", "none"]
Cause = Literal[
    "load", "overload", "crowd", "prefixes", "tenants", "kill", "gpu", "device", "poison", "numerics", "redis", "tiers",
    "memory", "books",
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
    "redis": "both Redis go away",
}
#: The variables that every dashboard has: series of what was renamed, which have no `model`, are not meant.
SELECTED = 'cell=~"$cell", model=~"$model"'


@dataclass(frozen=True, slots=True)
class Query:
    """`legend` as Grafana fills it in: `{{label}}`."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A graph, or a single number (`stat`). `meaning` is what people read beside it; `cause` changes its value."""

    title: str
    meaning: str
    queries: Sequence[Query]
    cause: Cause
    unit: Unit = "short"
    stat: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """Rows of panels under a heading."""

    name: str
    title: str
    rows: Sequence[tuple[str, Sequence[Panel]]]

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
    """Of a histogram, over all processes."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({share}, {rate(metric + '_bucket', labels)})"


def quantiles(metric: str) -> tuple[Query, ...]:
    """The usual three."""
    return tuple(Query(quantile(share, metric), f"p{100 * share:.0f}") for share in (0.5, 0.95, 0.99))


def mean(metric: str, by: str = "") -> str:
    """Of a histogram or a summary, over all processes, in the interval."""
    return f"{rate(metric + '_sum', by)} / {rate(metric + '_count', by)}"

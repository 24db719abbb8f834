"""Grafana's dashboards without a Grafana: every query parses and asks for what there is, in the unit that it has.

What the queries answer on a running system: tests/observability.
"""

import json
from collections.abc import Iterator
from typing import Any, cast

import promql_parser
import pytest
from prometheus_client import CollectorRegistry

from blockrelay.observability.metrics.gateway import GatewayMetrics
from blockrelay.observability.metrics.scheduler import SchedulerMetrics
from blockrelay.observability.metrics.tenants import TenantMetrics
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.observability.registry import service_registry
from deploy.dashboards.__main__ import DASHBOARDS, FOLDER
from deploy.dashboards.build import to_json
from deploy.dashboards.panel import Dashboard, Panel
from tests.support.promql import filled_in

PANELS = [(board, panel) for board in DASHBOARDS for panel in board.panels]
NAMES = [f"{board.name}: {panel.title}" for board, panel in PANELS]


def registered() -> dict[str, set[str]]:
    """Every name that a query may have -> the labels of its series."""
    registry = service_registry("any", cell="c0", model="m")
    for group in (GatewayMetrics, SchedulerMetrics, TenantMetrics, WorkerMetrics):
        group(CollectorRegistry())
    collectors: list[Any] = []
    for group in (GatewayMetrics, SchedulerMetrics, TenantMetrics, WorkerMetrics):
        own = CollectorRegistry()
        group(own)
        collectors += cast(Any, own)._collector_to_names
    collectors += cast(Any, registry)._collector_to_names
    found: dict[str, set[str]] = {}
    for collector in collectors:
        for family in collector.collect():
            labels = {*(getattr(collector, "_labelnames", ()) or getattr(family, "_labelnames", ()))}
            labels |= {label for sample in family.samples for label in sample.labels}
            for suffix in ("", "_total", "_info", "_bucket", "_sum", "_count"):
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


def grouped_by(node: Any) -> Iterator[str]:
    modifier = getattr(node, "modifier", None)
    yield from getattr(modifier, "labels", None) or ()
    for name in ("expr", "lhs", "rhs"):
        if (below := getattr(node, name, None)) is not None:
            yield from grouped_by(below)
    for below in getattr(node, "args", None) or ():
        yield from grouped_by(below)


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.name)
def test_what_is_committed_is_what_the_data_says(board: Dashboard) -> None:
    committed = (FOLDER / f"{board.name}.json").read_text()
    assert committed == to_json(board), "python -m deploy.dashboards writes them anew"
    told = json.loads(committed)
    assert told["uid"] == f"blockrelay-{board.name}"
    assert [panel["title"] for panel in told["panels"] if panel["type"] != "row"] == [p.title for p in board.panels]


def test_nothing_else_lies_beside_them() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {f"{board.name}.json" for board in DASHBOARDS}


@pytest.mark.parametrize(("_", "panel"), PANELS, ids=NAMES)
def test_a_panel_asks_for_what_there_is(_: Dashboard, panel: Panel) -> None:
    known = registered()
    assert (panel.queries and panel.meaning.endswith(".")) or panel.meaning.startswith(("1:", "0,"))
    for query in panel.queries:
        tree = promql_parser.parse(filled_in(query.expr))
        found = list(selectors(tree))
        assert found
        for selector in found:
            assert selector.name in known, f"{selector.name} is no metric of ours"
            labels = {matcher.name for matcher in selector.matchers.matchers} | set(grouped_by(tree))
            assert labels <= known[selector.name], f"{selector.name} has no labels {labels - known[selector.name]}"
        legend = {part.split("}}")[0] for part in query.legend.split("{{")[1:]}
        assert legend <= set(grouped_by(tree)), "the legend names what the query does not keep"


@pytest.mark.parametrize(("_", "panel"), PANELS, ids=NAMES)
def test_a_panel_has_the_unit_of_what_it_shows(_: Dashboard, panel: Panel) -> None:
    for query in panel.queries:
        names = {selector.name for selector in selectors(promql_parser.parse(filled_in(query.expr)))}
        seconds = all("_seconds" in name for name in names)
        if " / " in query.expr and not any(name.endswith(("_sum", "_count")) for name in names):
            assert panel.unit == "percentunit"
        elif any(name.endswith("_seconds_total") for name in names):
            assert panel.unit == "percentunit", "seconds per second"
        elif seconds:
            assert panel.unit == "s"
        elif any("_bytes" in name for name in names):
            assert panel.unit == "bytes"
        elif any(name.endswith("_perc") for name in names):
            assert panel.unit == "percentunit"
        elif "rate(" in query.expr and "_sum" not in query.expr:
            assert panel.unit in ("reqps", "ops", "cps")
        else:
            assert panel.unit in ("short", "none")


def test_a_typing_mistake_would_be_found() -> None:
    (selector,) = selectors(promql_parser.parse("rate(blockrelay_generation_token_total[1m])"))
    assert selector.name not in registered()

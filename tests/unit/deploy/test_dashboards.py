"""Grafana's dashboards without a Grafana: every query parses and asks for what there is, in the unit that it has.

What the queries answer on a running system: tests/observability.
"""

import json
import re

import promql_parser
import pytest
from prometheus_client import CollectorRegistry

from blockrelay.observability.sensors import Sensors
from deploy.dashboards.__main__ import DASHBOARDS, FOLDER
from deploy.dashboards.build import to_json
from deploy.dashboards.panel import NEEDS_HARDWARE, Dashboard, Panel
from tests.support.promql import filled_in, grouped_by, misread, registered, selectors

PANELS = [(board, panel) for board in DASHBOARDS for panel in board.panels]
NAMES = [f"{board.name}: {panel.title}" for board, panel in PANELS]


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
            assert panel.unit == ("Bps" if "rate(" in query.expr else "bytes")
        elif any(name.endswith(("_celsius", "_watts")) for name in names):
            assert panel.unit in ("celsius", "watt")
        elif any(name.endswith("_ratio") for name in names):
            assert panel.unit == "percentunit"
        elif "rate(" in query.expr and "_sum" not in query.expr:
            assert panel.unit in ("reqps", "ops", "cps")
        else:
            assert panel.unit in ("short", "none")


@pytest.mark.parametrize(("_", "panel"), PANELS, ids=NAMES)
def test_a_panel_adds_up_what_is_of_processes_and_nothing_of_the_cell(_: Dashboard, panel: Panel) -> None:
    for query in panel.queries:
        assert not misread(promql_parser.parse(filled_in(query.expr)))


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.name)
def test_every_choice_of_a_dashboard_is_taken_to_heart_by_its_queries(board: Dashboard) -> None:
    """And it is said of what no choice concerns."""
    asked = [query.expr for panel in board.panels for query in panel.queries]
    for name in board.variables:
        assert all(f"${name}" in expr or "process_resident" in expr for expr in asked), name
    others = {name for expr in asked for name in re.findall(r"\$(\w+)", expr)} - {"__rate_interval", *board.variables}
    assert not others
    assert {one["name"] for one in json.loads(to_json(board))["templating"]["list"]} == {"datasource", *board.variables}


def test_what_needs_hardware_is_what_sensors_tell_and_nothing_else() -> None:
    Sensors(registry := CollectorRegistry(), list)
    told = {family.name for family in registry.collect()}
    assert set(NEEDS_HARDWARE) == told
    assert {panel.title for _, panel in PANELS if panel.needs_hardware} == {"Utilisation", "Temperature", "Power"}


def test_errors_and_saturation_come_first() -> None:
    (heading, first), *_ = DASHBOARDS[0].rows
    assert heading == "Errors and saturation" and [p.title for p in first] == ["Errors of ours", "Saturation"]


def test_a_sum_over_schedulers_would_be_found() -> None:
    assert misread(promql_parser.parse("sum by (reason) (rate(blockrelay_reruns_total[1m]))"))
    assert misread(promql_parser.parse("sum(blockrelay_requests_in_flight)"))
    assert misread(promql_parser.parse("max(rate(blockrelay_generation_tokens_total[1m]))"))


def test_a_typing_mistake_would_be_found() -> None:
    (selector,) = selectors(promql_parser.parse("rate(blockrelay_generation_token_total[1m])"))
    assert selector.name not in registered()

"""Grafana's dashboards without a Grafana: every query parses and asks for what there is, in the unit that it has.

What the queries answer on a running system: tests/observability.
"""

import json

import promql_parser
import pytest

from deploy.dashboards.__main__ import DASHBOARDS, FOLDER
from deploy.dashboards.build import to_json
from deploy.dashboards.panel import Dashboard, Panel
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
            assert panel.unit == "bytes"
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


def test_a_sum_over_schedulers_would_be_found() -> None:
    assert misread(promql_parser.parse("sum by (reason) (rate(blockrelay_reruns_total[1m]))"))
    assert misread(promql_parser.parse("sum(blockrelay_requests_in_flight)"))
    assert misread(promql_parser.parse("max(rate(blockrelay_generation_tokens_total[1m]))"))


def test_a_typing_mistake_would_be_found() -> None:
    (selector,) = selectors(promql_parser.parse("rate(blockrelay_generation_token_total[1m])"))
    assert selector.name not in registered()

"""Every panel of every dashboard, asked of a real Prometheus: the value that it shows differs between a quiet system
and one that meets what the panel is for.
"""

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from deploy.dashboards.__main__ import DASHBOARDS
from deploy.dashboards.panel import CAUSES as NAMED
from deploy.dashboards.panel import Panel, Query
from tests.support.prometheus import Series
from tests.support.promql import filled_in
from tests.support.systems.causes import CAUSES, Watched, watched_system
from tests.support.systems.system import StartSystem
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.observability, pytest.mark.timeout(900)]

#: Seconds without anything before a system counts as quiet: longer than rates look back.
QUIET_S = 18


def shown(on: Watched, panel: Panel, since: float) -> list[Series]:
    return [on.prometheus.values(filled_in(query.expr), since) for query in panel.queries]


def differ(quiet: list[Series], now: list[Series]) -> bool:
    """Whether some value of some series lies outside of what was shown in quiet."""
    for before, after in zip(quiet, now, strict=True):
        for series, values in after.items():
            known = before.get(series, [])
            if not known or min(values) < min(known) or max(values) > max(known):
                return True
    return False


def legend(query: Query, labels: dict[str, str]) -> str:
    """As Grafana writes it below a graph."""
    return re.sub(r"\{\{(\w+)\}\}", lambda label: labels.get(label[1], ""), query.legend)


def keep(on: Watched, file: Path, began: float, happened: list[tuple[str, float, float]]) -> None:
    """What deploy/dashboards/pictures.py draws."""
    told: dict[str, dict[str, list[Any]]] = {}
    for board in DASHBOARDS:
        for panel in board.panels:
            told.setdefault(board.name, {})[panel.title] = [
                [legend(query, dict(labels)), points]
                for query in panel.queries
                for labels, points in on.prometheus.points(filled_in(query.expr), began).items()
            ]
    text = json.dumps({"began": began, "causes": happened, "panels": told})
    for server, name in ((on.system.control, "redis:6379"), (on.system.payload, "redis-payload:6379")):
        text = text.replace(server.url, name)
    file.write_text(text)


def test_causes_have_names_that_readers_understand() -> None:
    assert list(CAUSES) == list(NAMED)


def test_every_panel_shows_what_it_is_for(
    start_system: StartSystem, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    happened: list[tuple[str, float, float]] = []
    not_shown: dict[str, list[tuple[str, str]]] = {}
    shown_here = [(board, panel) for board in DASHBOARDS for panel in board.panels if not panel.needs_hardware]
    panels = {(board.name, panel.title): panel for board, panel in shown_here}
    assert {panel.cause for panel in panels.values()} <= CAUSES.keys()
    with watched_system(start_system, tmp_path) as watched:
        began = time.time()
        threading.Event().wait(QUIET_S)  # what rates of a quiet time look back on
        quiet = {name: shown(watched, panel, time.time() - 3) for name, panel in panels.items()}
        for cause in dict.fromkeys(panel.cause for panel in panels.values()):
            waiting = {name: panel for name, panel in panels.items() if panel.cause == cause}
            started = time.time()

            def all_differ(waiting: dict[tuple[str, str], Panel] = waiting, since: float = started) -> bool:
                for name, panel in list(waiting.items()):
                    if differ(quiet[name], shown(watched, panel, since)):
                        del waiting[name]
                return not waiting

            with CAUSES[cause](watched):
                try:
                    wait_until(all_differ, f"its panels show {cause}", poll_s=0.2)
                except AssertionError:
                    not_shown[cause] = sorted(waiting)
            happened.append((cause, started, time.time()))
        assert not not_shown, not_shown
        without = [name for name, panel in panels.items() if not all(shown(watched, panel, began))]
        assert not without, f"a query of theirs has no value: {without}"
        if file := request.config.getoption("--panels-to"):
            keep(watched, Path(file), began, happened)

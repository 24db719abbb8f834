"""docs/dashboards.md: pictures and meanings of every panel, from the dashboards as data."""

from deploy.dashboards.__main__ import DASHBOARDS
from deploy.dashboards.panel import CAUSES, Dashboard
from docs.generate.tables import table

_HEAD = """\
# Dashboards

What each panel of [Grafana's dashboards](observability.md) is for. The pictures show a real run: one trouble after the
other was done to a system (grey), and what a panel is for is orange there, with its name. `make dashboard-pictures`
does such a run and draws them anew.

"""


def page() -> str:
    """The whole page."""
    troubles = table(["trouble", "what was done"], CAUSES.items())
    return _HEAD + troubles + "".join(map(_part, DASHBOARDS))


def _part(board: Dashboard) -> str:
    rows = [(panel.title, panel.meaning, panel.cause) for panel in board.panels]
    picture = f"![Every panel of {board.title}](dashboards/{board.name}.png)"
    return f"\n## {board.title}\n\n{picture}\n\n" + table(["panel", "meaning", "trouble"], rows)

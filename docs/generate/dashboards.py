"""Pictures and meanings of every panel in docs/observability.md, from the dashboards as data."""

from deploy.dashboards.__main__ import DASHBOARDS
from deploy.dashboards.panel import CAUSES, Dashboard
from docs.generate.tables import table

_HEAD = """
The pictures show a real run: one trouble after the other was done to a system (grey), and what a panel is for is orange
there, with its name. `make dashboard-pictures` does such a run and draws them.

"""


def panels() -> str:
    """Returns a table of the troubles, then a picture and a table of each dashboard."""
    troubles = table(["trouble", "what was done"], CAUSES.items())
    return _HEAD + troubles + "".join(map(_part, DASHBOARDS))


def _part(board: Dashboard) -> str:
    rows = [(panel.title, panel.meaning, panel.cause) for panel in board.panels]
    picture = f"![Every panel of {board.title}](dashboards/{board.name}.png)"
    return f"\n### {board.title}\n\n{picture}\n\n" + table(["panel", "meaning", "trouble"], rows)

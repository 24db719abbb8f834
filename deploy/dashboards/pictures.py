"""`python -m deploy.dashboards.pictures RECORDED`: draws docs/dashboards/*.png, every panel with values of a real run.

RECORDED is the file that tests/observability writes with `--panels-to`: answers of a real Prometheus while one cause
after the other happened to a real system. Needs matplotlib (`make dashboard-pictures`).
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib  # pyright: ignore[reportMissingImports]
from matplotlib import pyplot  # pyright: ignore[reportMissingImports]
from matplotlib.ticker import EngFormatter, PercentFormatter  # pyright: ignore[reportMissingImports]

from deploy.dashboards.__main__ import DASHBOARDS
from deploy.dashboards.panel import Dashboard, Panel

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "dashboards"
_COLUMNS = 2
_UNITS = {"s": "s", "bytes": "B", "Bps": "B/s", "celsius": "°C", "watt": "W"}
_MAX_NAMED = 6  # the names of more series do not fit into a panel's legend


def main(recorded: Path) -> None:
    """Draws one picture for each dashboard."""
    run = json.loads(recorded.read_text())
    FOLDER.mkdir(parents=True, exist_ok=True)
    matplotlib.use("Agg")
    for board in DASHBOARDS:
        _draw(board, run, FOLDER / f"{board.name}.png")


def _draw(board: Dashboard, run: dict[str, Any], path: Path) -> None:
    """Draws all panels of a dashboard into one picture."""
    rows = -(-len(board.panels) // _COLUMNS)
    figure, axes = pyplot.subplots(rows, _COLUMNS, figsize=(13, 2.9 * rows), squeeze=False, layout="constrained")
    for index, drawn in enumerate(axes.flat):
        if index < len(board.panels):
            panel = board.panels[index]
            if panel.kind == "heat map":
                _draw_map(drawn, panel, run["panels"][board.name].get(panel.title, []), run)
                continue
            _draw_panel(drawn, panel, run["panels"][board.name].get(panel.title, []), run)
        else:
            drawn.set_axis_off()
    figure.savefig(path, dpi=70, metadata={"Software": None})
    pyplot.close(figure)


def _draw_map(drawn: Any, panel: Panel, series: list[list[Any]], run: dict[str, Any]) -> None:
    """Draws a heat map. `series` has cumulative counts up to each bound; drawn is the count between two bounds."""
    bounds = sorted(((float(legend), dict(points)) for legend, points in series), key=lambda one: one[0])
    times = sorted({at for _, points in bounds for at in points})
    counts = [[points.get(at, 0.0) for at in times] for _, points in bounds]
    below = [[0.0] * len(times), *counts]
    between = [[max(0.0, b - a) for a, b in zip(*two, strict=True)] for two in zip(below, counts, strict=False)]
    seconds = [at - run["began"] for at in times]
    drawn.pcolormesh(seconds, range(len(bounds)), between, cmap="Oranges", shading="nearest")
    drawn.set_yticks(range(len(bounds)), [f"{bound:g}" for bound, _ in bounds])
    drawn.set_title(panel.title, fontsize=10, loc="left")
    drawn.tick_params(labelsize=6)


def _draw_panel(drawn: Any, panel: Panel, series: list[list[Any]], run: dict[str, Any]) -> None:
    """Draws a panel as lines, with the times of all causes in grey and of its own in orange."""
    for legend, points in series:
        named = {"label": legend} if legend and len(series) <= _MAX_NAMED else {}
        drawn.plot([at - run["began"] for at, _ in points], [value for _, value in points], linewidth=1.2, **named)
    for cause, start, end in run["causes"]:
        here, colour, alpha = (cause, "#d97706", 0.25) if cause == panel.cause else ("", "#9aa5b1", 0.1)
        drawn.axvspan(start - run["began"], end - run["began"], color=colour, alpha=alpha)
        drawn.text(start - run["began"], 0.98, here, transform=drawn.get_xaxis_transform(), fontsize=8, va="top")
    drawn.set_title(panel.title, fontsize=10, loc="left")
    drawn.set_ylim(bottom=0)
    drawn.tick_params(labelsize=7)
    drawn.grid(alpha=0.3)
    if panel.unit == "percentunit":
        drawn.yaxis.set_major_formatter(PercentFormatter(1.0))
    else:
        drawn.yaxis.set_major_formatter(EngFormatter(_UNITS.get(panel.unit, ""), sep=""))
    if drawn.get_legend_handles_labels()[0]:
        drawn.legend(fontsize=6, loc="upper left", framealpha=0.6)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The report of a measurement as data, as a table, and between the marks of docs/quantisation.md. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.quality.measure import Measured
from bench.quality.model_file import MODEL, PACKAGE
from bench.quality.sides import REFERENCE
from bench.quality.texts import WINDOW

#: The names of the marks, by whether the weights are off their grid.
_MARKS = {False: "formats", True: "formats off the grid"}

#: What tables are made from, in a report.
KEYS = {"model", "off_grid", "window", "machine", "bytes", "tokens", "figures", "errors"}


def report_of(
    measured: Measured,
    texts: Mapping[str, Sequence[int]],
    *,
    sizes: Mapping[str, int],
    numerics: Mapping[str, str],
    machine: Mapping[str, Any],
    off_grid: bool = False,
) -> dict[str, Any]:
    """Returns the report as JSON has it. `texts`: tokens by name; `sizes`: bytes, and `numerics`: ids, by side.

    `off_grid`: the weights were moved off the grid that the file has.
    """
    return {
        "model": MODEL,
        "package": PACKAGE,
        "off_grid": off_grid,
        "window": WINDOW,
        "machine": dict(machine),
        "bytes": dict(sizes),
        "numerics_ids": dict(numerics),
        "tokens": {name: len(tokens) for name, tokens in texts.items()},
        "figures": {
            side: {text: asdict(figures) for text, figures in by_text.items()}
            for side, by_text in measured.figures.items()
        },
        "errors": dict(measured.errors),
    }


def table(report: Mapping[str, Any]) -> str:
    """Returns the table in Markdown: a row for each side, a column for its size and for each text."""
    texts = list(report["tokens"])
    rows = [
        _row("", "MB", *(f"{text}, {report['tokens'][text]:,} tokens" for text in texts)),
        "|---" * (len(texts) + 2) + "|",
    ]
    for side, figures in report["figures"].items():
        shown = _perplexity if side == REFERENCE else _difference
        name = side if "llama" in side else f"`{side}`"
        rows.append(_row(name, f"{report['bytes'][side] / 1e6:.0f}", *(shown(figures[text]) for text in texts)))
    rows += [
        _row(side, "", f"not measured: {error}", *[""] * (len(texts) - 1)) for side, error in report["errors"].items()
    ]
    return "\n".join(rows)


def section(report: Mapping[str, Any]) -> str:
    """Returns the table with what a reader needs to know about it."""
    machine = report["machine"]
    command = "`make quality ARGS=--off-grid`" if report["off_grid"] else "`make quality`"
    return (
        f"{command} on {report['model']}, {machine['cpu']} ({', '.join(machine['flags'])}). `{REFERENCE}`: "
        "perplexity. The others: what is added to it, mean KL divergence from float32 in nats, and the share of "
        f"positions with the same most likely token. Windows of {report['window']} tokens.\n\n{table(report)}"
    )


def published(page: str, report: Mapping[str, Any]) -> str:
    """Returns the page with the table between its marks."""
    name = _MARKS[report["off_grid"]]
    mark = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    assert mark.search(page), f"the page has no mark {name}"
    return mark.sub(lambda match: f"{match[1]}\n{section(report)}\n\n{match[2]}", page)


def _row(*cells: str) -> str:
    shown = (f" {cell.replace('|', '/')} " if cell else " " for cell in cells)
    return f"|{'|'.join(shown)}|"


def _perplexity(figures: Mapping[str, float]) -> str:
    return f"{figures['perplexity']:.3f}"


def _difference(figures: Mapping[str, float]) -> str:
    cost = round(figures["cost"], 4) or 0.0  # no -0.00%
    return f"{cost:+.2%}, {figures['kl']:.4f}, {figures['same_top']:.1%}"

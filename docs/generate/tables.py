"""Markdown tables."""

from collections.abc import Iterable, Sequence
from itertools import cycle


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose cells may hold any text of one line."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(text) for text in line)} |" for line in lines) + "\n"


def _cell(text: str) -> str:
    parts = " ".join(text.replace("|", "\\|").split()).split("`")
    return "`".join(
        part if inside else part.replace("<", "&lt;") for part, inside in zip(parts, cycle((False, True)), strict=False)
    )

"""Tables for people, on terminals of any width: no heading and no value is ever cut."""

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

#: What a column whose text may be folded into lines needs at least.
FOLDED = 24


def print_table(
    console: Console, title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, folds: str = ""
) -> None:
    """A table where it fits the width, in which the column `folds` may take several lines; else the rows one below the
    other, each with its headings."""
    if _width(head, rows, folds) > console.width:
        _print_rows(console, title, head, rows)
        return
    table = Table(title=title)
    for name in head:
        table.add_column(name, no_wrap=name != folds)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def _width(head: Sequence[str], rows: Sequence[Sequence[str]], folds: str) -> int:
    """What a table needs: two blanks and a border beside each column."""
    columns = zip(head, *rows, strict=True)
    widths = [max(len(line) for cell in column for line in cell.splitlines() or [""]) for column in columns]
    least = [min(width, FOLDED) if name == folds else width for name, width in zip(head, widths, strict=True)]
    return sum(least) + 3 * len(head) + 1


def _print_rows(console: Console, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    console.print(Text(title, "italic"))
    for row in rows:
        console.print(Text(f"{head[0]} {row[0]}", "bold"), soft_wrap=True)  # what people copy has no line breaks
        told = ", ".join(f"{name} {value}" for name, value in zip(head[1:], row[1:], strict=True) if value)
        console.print(Padding(Text(told), (0, 0, 0, 2)))

"""Prints tables on terminals of any width, without cutting a heading or a value."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

#: The least width of a column whose text may be wrapped.
FOLDED = 24


def print_table(
    console: Console, title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, folds: str = ""
) -> None:
    """Prints a table if it fits the console's width, else each row as a paragraph with its headings.

    The column `folds` may be wrapped to several lines.
    """
    if _width(head, rows, folds) > console.width:
        _print_rows(console, title, head, rows)
        return
    table = Table(title=title)
    for name in head:
        table.add_column(name, no_wrap=name != folds)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def facts_table(title: str, rows: Mapping[str, object]) -> Table:
    """Returns a table with a row for each name and its figure."""
    table = Table(show_header=False, title=title)
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _width(head: Sequence[str], rows: Sequence[Sequence[str]], folds: str) -> int:
    """Returns the width that the table needs: each column with two blanks and a border."""
    columns = zip(head, *rows, strict=True)
    widths = [max(len(line) for cell in column for line in cell.splitlines() or [""]) for column in columns]
    least = [min(width, FOLDED) if name == folds else width for name, width in zip(head, widths, strict=True)]
    return sum(least) + 3 * len(head) + 1


def _print_rows(console: Console, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    console.print(Text(title, "italic"))
    for row in rows:
        console.print(Text(f"{head[0]} {row[0]}", "bold"), soft_wrap=True)  # so that a copied id has no line break
        text = ", ".join(f"{name} {value}" for name, value in zip(head[1:], row[1:], strict=True) if value)
        console.print(Padding(Text(text), (0, 0, 0, 2)))

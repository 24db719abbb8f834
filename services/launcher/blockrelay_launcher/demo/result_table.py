"""The table of figures at the end of a demo."""

from collections.abc import Mapping

from rich.table import Table


def result_table(title: str, rows: Mapping[str, str]) -> Table:
    """Returns a table with a row for each name and its figure."""
    table = Table(show_header=False, title=title)
    for name, value in rows.items():
        table.add_row(name, value)
    return table

"""The table that a demo ends with."""

from collections.abc import Mapping

from rich.table import Table


def result_table(title: str, rows: Mapping[str, str]) -> Table:
    """Names and figures, one row each."""
    table = Table(show_header=False, title=title)
    for name, value in rows.items():
        table.add_row(name, value)
    return table

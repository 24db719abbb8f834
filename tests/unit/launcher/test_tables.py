"""Tables on terminals of any width."""

import io

import pytest
from rich.console import Console

from blockrelay_launcher.tables import print_table

HEAD = ("worker", "device", "stage", "state", "requests", "pages", "heartbeat")
ROWS = [("a-host.example:12345:abcdef0123abcd", "cpu", "0", "waiting for a stage", "17", "100/4096", "0.2 s ago")]
WHY = "the whole model, because the sum of what its blocks need is less than what the device has room for"


def printed(width: int, head: tuple[str, ...], rows: list[tuple[str, ...]], *, folds: str = "") -> list[str]:
    out = io.StringIO()
    print_table(Console(file=out, width=width), "a title", head, rows, folds=folds)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_nothing_is_cut(width: int) -> None:
    lines = printed(width, HEAD, ROWS)
    text = "\n".join(lines)
    assert "…" not in text and all(len(line) <= width for line in lines)
    joined = " ".join(text.split())
    assert all(word in joined for word in (*HEAD, *ROWS[0])), text


def test_rows_one_below_the_other_where_a_table_does_not_fit() -> None:
    assert printed(80, HEAD, ROWS) == [
        "a title",
        "worker a-host.example:12345:abcdef0123abcd",
        "  device cpu, stage 0, state waiting for a stage, requests 17, pages 100/4096,",
        "  heartbeat 0.2 s ago",
    ]


def test_a_long_reason_takes_several_lines_of_its_column() -> None:
    lines = printed(60, ("stage", "why"), [("0", WHY)], folds="why")
    assert any("stage" in line and "why" in line for line in lines), "a table"
    told = " ".join(word for line in lines for word in line.replace("│", " ").split())
    assert WHY in told


def test_what_looks_like_markup_is_shown_as_it_is() -> None:
    assert any("[0-9]" in line for line in printed(80, ("a", "b"), [("[0-9]", "x")]))

"""Quantities as people write them."""

import pytest

from blockrelay.errors import UsageError
from blockrelay.quantities import format_quantity, format_seconds, parse_quantity


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [("24GB", "B", 24e9), ("24 GiB", "B", 24 * 2**30), ("900GB/s", "B/s", 9e11), ("1.5kB", "B", 1500), ("7B", "B", 7)],
)
def test_what_is_read(text: str, unit: str, value: float) -> None:
    assert parse_quantity(text, unit, where="--add") == value


@pytest.mark.parametrize("text", ["", "24", "GB", "-1GB", "24GBs", "1e9B", "24 iB", "nanB", "24ZB"])
def test_what_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--add: .* is not a quantity such as 24GB"):
        parse_quantity(text, "B", where="--add")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (310_400_000, "310 MB"),
        (8_030_261_248, "8.03 GB"),
        (-5500, "-5.5 kB"),
    ],
)
def test_what_is_shown(value: float, text: str) -> None:
    assert format_quantity(value, "B") == text


def test_counts_have_no_unit() -> None:
    assert format_quantity(8_030_261_248) == "8.03 G"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (4e-5, "40 µs"),
        (0.00124, "1.24 ms"),
        (0.3104, "310 ms"),
        (1.0, "1 s"),
        (61.23, "61.2 s"),
        (3560, "59.3 min"),
        (9000, "2.5 h"),
    ],
)
def test_times_are_shown_in_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text

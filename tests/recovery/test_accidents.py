"""ACCIDENTS.md names tests that exist."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick  # it only reads

TESTS = Path(__file__).parents[1]


def test_every_accident_is_held_off_by_a_test_that_exists() -> None:
    rows = [row for row in (TESTS / "recovery" / "ACCIDENTS.md").read_text().splitlines() if row.startswith("| ")][1:]
    paths = list(TESTS.rglob("test_*.py"))
    there = {path.name for path in paths}
    for path in paths:
        there.update(re.findall(r"def (\w+)\(", path.read_text()))
    assert len(rows) >= 20
    for row in rows:
        names = re.findall(r"`(test_[\w.]+)`", row.rpartition("| ")[2] + row.split("|")[-2])
        assert names, row
        for name in names:
            assert name in there, name

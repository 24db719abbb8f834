"""The file of cells: what it may say, and which list is in force when."""

import json
from pathlib import Path
from typing import Any

import pytest

from blockrelay.cell_list import LONGEST_REQUEST_S, CellPlace, check_successor, read_cells
from blockrelay.errors import UsageError
from tests.support.kubernetes.variants import file_of_cells

NOON = 1_795_435_200.0  # 2026-11-23T12:00:00Z
DAY = 24 * 3600
GOOD: dict[str, Any] = {
    "cells": {
        "c0": {"redis_url": "redis://a:6379/0", "payload_redis_url": "redis://b:6379/0"},
        "c1": {"redis_url": "redis://c:6379/0"},
    },
    "lists": [
        {"version": 1, "since": "2026-11-01T00:00:00Z", "weights": {"c0": 1}},
        {"version": 2, "since": "2026-11-23T12:00:00Z", "weights": {"c0": 1, "c1": 2}},
        {"version": 4, "since": "2026-11-23T13:00:00+00:00", "weights": {"c1": 2, "c0": 0}},
    ],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cells.json"
    path.write_text(json.dumps(GOOD))
    return path


def test_it_says_where_the_cells_are(file: Path) -> None:
    places = read_cells(file).places
    assert places["c0"] == CellPlace("c0", "redis://a:6379/0", "redis://b:6379/0")
    assert places["c1"] == CellPlace("c1", "redis://c:6379/0")


@pytest.mark.parametrize(("at", "version"), [(-DAY, 1), (0, 2), (3599, 2), (3600, 4), (DAY, 4), (-10_000 * DAY, 1)])
def test_the_newest_list_is_in_force_whose_time_has_come(file: Path, at: float, version: int) -> None:
    assert read_cells(file).in_force(NOON + at).version == version


def test_an_earlier_list_counts_for_as_long_as_something_of_its_time_is_kept(file: Path) -> None:
    found, retention_s = read_cells(file), 3600

    def former(now: float) -> list[int]:
        return [one.version for one in found.former(now, retention_s)]

    assert former(NOON - 1) == []
    assert former(NOON) == [1]
    assert former(NOON + 3600) == [2, 1], "the newest first"
    kept = retention_s + LONGEST_REQUEST_S
    assert former(NOON + kept) == [2], "the second list came so long ago, and with it the first one went"
    assert former(NOON + 3600 + kept) == []


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (("cells",), {}, "there is none"),
        (("lists",), [], "there is none"),
        (("cells", "c1"), {}, "redis_url"),
        (("cells", "c1"), {"redis_url": "http://c"}, "redis_url: 'http://c' is not the URL of a Redis"),
        (("cells", "c1"), {"redis_url": "redis://c", "url": "x"}, "unknown field 'url'"),
        (("cells", "C 1"), {"redis_url": "redis://c"}, "1 to 32 characters of a-z 0-9 -"),
        (("more",), 1, "unknown field 'more'"),
        (("lists", 1, "version"), 1, "version 1 must be newer than version 1 before it"),
        (("lists", 1, "since"), "2026-10-01T00:00:00Z", "version 2 must be newer"),
        (("lists", 1, "since"), "yesterday", "must be a date and time"),
        (("lists", 1, "since"), "2026-11-23T12:00:00", "needs a time zone"),
        (("lists", 1, "weights"), {"c0": 0}, "a cell must have a weight above 0"),
        (("lists", 1, "weights"), {"c0": -1}, "integer of at least 0"),
        (("lists", 1, "weights"), {"c0": 10**310}, "c0: at most 1000000000"),
        (("lists", 2, "version"), 10**20, "version: at most 1000000000"),
        (("lists", 2, "weights"), {"c7": 1}, "'c7', which is not among the cells"),
    ],
)
def test_what_it_may_not_say_is_one_line_that_names_it(
    tmp_path: Path, path: tuple[Any, ...], value: Any, complaint: str
) -> None:
    content = json.loads(json.dumps(GOOD))
    *outer, last = path
    at = content
    for step in outer:
        at = at[step]
    at[last] = value
    file = tmp_path / "cells.json"
    file.write_text(json.dumps(content))
    with pytest.raises(UsageError) as raised:
        read_cells(file)
    assert complaint in str(raised.value) and str(file) in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_that_is_not_there_or_no_json_is_one_line_too(tmp_path: Path) -> None:
    file = tmp_path / "cells.json"
    with pytest.raises(UsageError, match=r"cells\.json: No such file"):
        read_cells(file)
    file.write_text("{")
    with pytest.raises(UsageError, match=r"cells\.json: not JSON"):
        read_cells(file)


def test_the_documented_file_is_one(tmp_path: Path) -> None:
    file = tmp_path / "cells.json"
    file.write_text(file_of_cells())
    found = read_cells(file)
    assert (list(found.places), [one.version for one in found.lists]) == (["c0", "c1"], [1, 2])


@pytest.mark.parametrize(
    ("lists", "complaint"),
    [
        ([GOOD["lists"][0]], "version 2 is missing"),
        (GOOD["lists"][1:], "version 1 is missing"),
        ([*GOOD["lists"][:1], {**GOOD["lists"][1], "weights": {"c0": 2, "c1": 2}}], "version 2 is not what it was"),
        ([{**GOOD["lists"][0], "since": "2026-11-02T00:00:00Z"}, GOOD["lists"][1]], "version 1 is not what it was"),
        ([*GOOD["lists"][:2], {**GOOD["lists"][2], "version": 3}], None),
        ([*GOOD["lists"][:2], {"version": 5, "since": "2026-11-23T12:00:00Z", "weights": {"c1": 1}}], None),
        (GOOD["lists"][:2], None),
    ],
)
def test_what_keys_may_go_by_stays_as_it_was(tmp_path: Path, lists: list[Any], complaint: str | None) -> None:
    """A list whose time has not come may be changed or taken out."""
    files = [tmp_path / "before.json", tmp_path / "after.json"]
    for file, content in zip(files, (GOOD, {**GOOD, "lists": lists}), strict=True):
        file.write_text(json.dumps(content))
    before, after = map(read_cells, files)
    if complaint is None:
        check_successor(before, after, files[1], now=NOON + 60, retention_s=3600)
        return
    with pytest.raises(UsageError) as raised:
        check_successor(before, after, files[1], now=NOON + 60, retention_s=3600)
    assert str(raised.value).startswith(f"{files[1]}: lists: {complaint}")


def test_a_date_of_long_ago_ends_no_list_that_is_in_force(tmp_path: Path) -> None:
    files = [tmp_path / "before.json", tmp_path / "after.json"]
    first = GOOD["lists"][0]
    for file, lists in zip(files, ([first], [first, {**first, "version": 2, "weights": {"c1": 1}}]), strict=True):
        file.write_text(json.dumps({**GOOD, "lists": lists}))
    before, after = map(read_cells, files)
    with pytest.raises(UsageError, match="version 1 would be over at once: the date of the list after it"):
        check_successor(before, after, files[1], now=NOON, retention_s=3600)


def test_a_cell_that_comes_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cells.json"
    file.write_text(json.dumps(GOOD).replace('"c1": {"redis', '"c0": {"redis'))
    with pytest.raises(UsageError, match="'c0' comes twice in one object"):
        read_cells(file)

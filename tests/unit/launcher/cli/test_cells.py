"""`blockrelay cells` against a real Redis."""

import io
import time
from pathlib import Path

import pytest
import redis
from rich.console import Console
from typer.testing import CliRunner

from blockrelay.cell_list import CellFile as CellListFile
from blockrelay.cell_list import CellList
from blockrelay.errors import UsageError
from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import Scripts
from blockrelay_launcher.cli.cells import CellsState, lists, read, show
from blockrelay_launcher.cli.main import app
from tests.support.cell import Cell
from tests.support.redis.redis_server import RedisServer
from tests.support.systems.cell_file import CellFile


@pytest.fixture
def cells() -> list[Keys]:
    return [Keys("c0")]


@pytest.fixture
def file(tmp_path: Path, redis_server: RedisServer) -> CellFile:
    nobody = f"unix://user:secret@{tmp_path}/nobody.sock"
    return CellFile(tmp_path / "cells.json", {"c0": redis_server.url, "c1": nobody})


def shown(file: CellFile) -> str:
    out = io.StringIO()
    show(read(file.path), Console(file=out, width=400))
    return out.getvalue()


def test_it_shows_what_cells_do_and_which_list_is_in_force(file: CellFile, client: redis.Redis) -> None:
    keys = Keys("c0")
    cell = Cell(client, keys, Scripts(client, keys))
    cell.worker("a", stage=0)
    cell.accept("req-1")
    text = shown(file.put(c0=1).put(c0=1, c1=3))
    rows = [[part.strip() for part in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    assert [row[:4] for row in rows] == [["c0", "25%", "1", "1"], ["c1", "75%", "?", "?"]]
    assert "c1: Redis does not answer" in text
    assert "secret" not in text and f"unix://{file.path.parent}/nobody.sock" in text
    assert "list 2 is in force since 20" in text
    assert "list 1 is looked into for keys and sessions until 20" in text


def test_lists_that_come_and_that_are_over(file: CellFile) -> None:
    file.put(c0=1).put(c0=2).put(c0=3)
    state = read(file.path)
    at = time.time()
    later = {1: at - 1e7, 2: at - 1e6, 3: at + 1e6}
    dated = [CellList(one.version, later[one.version], one.weights) for one in state.file.lists]
    said = lists(CellsState(CellListFile(state.file.places, tuple(dated)), state.cells, at, 3600))
    assert [line[: len("list 3 comes")] for line in said] == ["list 3 comes", "list 2 is in", "list 1 is ov"]


def test_a_file_that_may_not_replace_another_is_told(file: CellFile, tmp_path: Path) -> None:
    before = tmp_path / "before.json"
    before.write_text(file.put(c0=1).path.read_text())
    file.put(c0=1, c1=1)
    read(file.path, before)
    with pytest.raises(UsageError, match=r"before\.json: lists: version 2 is missing"):
        read(before, file.path)


def test_the_command_needs_a_file(file: CellFile) -> None:
    run = CliRunner()
    assert "in force" in run.invoke(app, ["cells", str(file.put(c0=1).path)]).stdout
    assert "in force" in run.invoke(app, ["cells"], env={"BLOCKRELAY_CELLS": str(file.path)}).stdout
    assert isinstance(run.invoke(app, ["cells"]).exception, UsageError)

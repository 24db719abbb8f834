"""`plan rollback` goes back behind what an operator gave, not behind what memory decided."""

import json
from dataclasses import replace

import pytest

from blockrelay.errors import UsageError
from blockrelay.protocol.planned_split import equal_parts
from blockrelay.protocol.served_folder import folders_to_json
from blockrelay.protocol.transitions import calls
from blockrelay.redis.plan_history import Origin, PlanEntry, append
from blockrelay_scheduler.plan_command.__main__ import run
from blockrelay_scheduler.plan_command.in_force import planned_again
from blockrelay_scheduler.planning.plan_builder import decide
from tests.support.cell import MODEL as CELL_MODEL
from tests.support.cell import Cell
from tests.support.redis.redis_server import RedisServer
from tests.support.two_folders import BOTH, worker

SMALL = "n" * 16
PLAN = decide([worker("a", 0)], planned=equal_parts(4, 1), current=None).plan


def history(*entries: tuple[Origin, int, str]) -> list[PlanEntry]:
    """Entries (origin, number of stages, folder), given oldest first, as the plan history has them."""
    return [
        PlanEntry(id=f"{at}-0", planned=replace(equal_parts(4, stages), folder=folder), origin=origin, who="s")
        for at, (origin, stages, folder) in reversed([*enumerate(entries)])
    ]


@pytest.mark.parametrize(
    ("entries", "stages", "folder"),
    [
        ([("settings", 1, ""), ("apply", 2, "")], 1, ""),
        ([("settings", 1, ""), ("apply", 2, ""), ("degraded", 2, SMALL), ("restored", 2, "")], 1, ""),
        ([("settings", 1, ""), ("apply", 2, ""), ("degraded", 2, SMALL)], 1, SMALL),
        ([("settings", 1, ""), ("precision", 1, SMALL)], 1, ""),
    ],
)
def test_changes_that_memory_made_are_no_plans_to_go_back_to(
    entries: list[tuple[Origin, int, str]], stages: int, folder: str
) -> None:
    assert planned_again(history(*entries), None) == replace(equal_parts(4, stages), folder=folder)


def test_the_history_names_the_precision_of_each_entry(
    cell: Cell, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BLOCKRELAY_CELL", cell.keys.cell)
    publish = calls.publish_plan(CELL_MODEL, replaces_epoch=0, inputs="i", route_class="cpu", plan=PLAN.to_json())
    cell.scripts.run(publish)
    record = cell.keys.worker(cell.worker("a"))
    own, other = (replace(one, key=key) for one, key in zip(BOTH, (CELL_MODEL, SMALL), strict=True))
    cell.client.hset(record, "folders", folders_to_json([own, other]))
    behind = ""
    for folder in ("", SMALL, "gone", ""):
        planned = replace(equal_parts(4, 1), folder=folder)
        entry = append(cell.client, cell.keys, CELL_MODEL, planned, origin="precision", who="s", behind=behind)
        assert entry is not None
        behind = entry.id
    at = ("--redis", redis_server.url)
    assert run(["history", *at, "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [entry["precision"] for entry in entries] == ["w8a8", "gone", "w4a8", "w8a8"]
    assert run(["history", *at]) == 0
    shown = capsys.readouterr().out
    assert "precision" in shown and shown.index("gone") < shown.index("w4a8")
    wanted = entries[2]["entry"]
    assert run(["rollback", wanted, *at, "--dry-run"]) == 0
    assert "precision: w8a8 -> w4a8" in capsys.readouterr().out
    assert run(["rollback", wanted, *at, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["precision"] == "w4a8"
    assert run(["rollback", entries[3]["entry"], *at, "--dry-run"]) == 0
    assert "->" in (shown := capsys.readouterr().out) and "precision:" not in shown


def test_one_that_is_wanted_by_its_id_is_taken_as_it_is() -> None:
    entries = history(("settings", 1, ""), ("degraded", 1, SMALL), ("restored", 1, ""))
    assert planned_again(entries, "1-0").folder == SMALL
    with pytest.raises(UsageError, match="no other plan"):
        planned_again(entries, None)

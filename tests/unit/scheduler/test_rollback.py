"""`plan rollback` goes back behind what an operator gave, not behind what memory decided."""

from dataclasses import replace

import pytest

from blockrelay.errors import UsageError
from blockrelay.protocol.planned_split import equal_parts
from blockrelay.redis.plan_history import Origin, PlanEntry
from blockrelay_scheduler.plan_command.in_force import planned_again

SMALL = "n" * 16


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


def test_one_that_is_wanted_by_its_id_is_taken_as_it_is() -> None:
    entries = history(("settings", 1, ""), ("degraded", 1, SMALL), ("restored", 1, ""))
    assert planned_again(entries, "1-0").folder == SMALL
    with pytest.raises(UsageError, match="no other plan"):
        planned_again(entries, None)

"""One key is one request (I9) under lists of cells that follow each other, whenever each gateway reads them."""

import pytest

from tests.protocol_model.cells import CellRules, KeyInCells
from tests.protocol_model.explorer import explore

pytestmark = pytest.mark.model

#: The cell of the key by list 1, 2, ...: it moves, comes back, goes on, stays.
LISTS = [(0, 1), (0, 1, 0), (0, 1, 2), (0, 1, 0, 1), (0, 0, 1)]


@pytest.mark.parametrize("winners", LISTS, ids=str)
@pytest.mark.parametrize("gateways", [2, 3])
def test_a_key_begins_in_one_cell_and_every_client_is_answered(winners: tuple[int, ...], gateways: int) -> None:
    found = explore(KeyInCells(winners, gateways=gateways))
    assert found.counterexample is None, str(found.counterexample)
    assert found.states > 100


@pytest.mark.parametrize(
    ("rules", "winners", "kind"),
    [
        (CellRules(asks_former_cells=False), (0, 1), "broken"),
        (CellRules(writes_that_it_moved=False), (0, 1), "broken"),
        (CellRules(knows_its_version=False), (0, 1, 0), "hangs"),
        (CellRules(replaces_older_marks=False), (0, 1, 0), "hangs"),
    ],
    ids=["it asks no former cell", "it only looks", "a mark has no version", "an older mark stays"],
)
def test_without_one_of_the_rules_it_does_not_hold(rules: CellRules, winners: tuple[int, ...], kind: str) -> None:
    found = explore(KeyInCells(winners, rules=rules))
    assert found.counterexample is not None and found.counterexample.kind == kind

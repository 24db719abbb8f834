"""Which plan an `up` starts with."""

import json
from pathlib import Path

import pytest

from blockrelay.errors import UsageError
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_launcher.up_options.plan_choice import PlanChoice

DEVICES = {
    "devices": [
        {"id": name, "class": "CPU", "host": name, "bytes_per_second": 2e10, "operations_per_second": 2e11}
        for name in ("a", "b")
    ]
}


def test_equal_parts_where_nothing_else_is_asked_for() -> None:
    assert PlanChoice(stages=2).read(BUNDLED_MODEL, 7).text == "1-4,5-7"


def test_a_strategy_plans_for_the_devices_that_are_described(tmp_path: Path) -> None:
    (tmp_path / "devices.json").write_text(json.dumps(DEVICES))
    planned = PlanChoice(strategy="uniform", devices=tmp_path / "devices.json").read(BUNDLED_MODEL, 7)
    assert planned.devices == (("a",), ("b",)) and planned.blocks == 7


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (PlanChoice(stages=8), "stages is 8, but the model has 7 blocks"),
        (PlanChoice(strategy="magic"), "strategy magic: there is no strategy magic"),
        (PlanChoice(strategy="auto", plan=Path("p")), "--plan and --strategy"),
        (PlanChoice(strategy="auto", objective="joy"), "strategy auto: "),
        (PlanChoice(objective="latency"), "--objective is for --strategy"),
        (PlanChoice(strategy="auto", profile=Path("/nowhere/p")), "strategy auto: /nowhere/p: No such file"),
    ],
)
def test_what_cannot_be_is_one_line(choice: PlanChoice, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        choice.read(BUNDLED_MODEL, 7)
    assert said in str(raised.value) and "\n" not in str(raised.value)

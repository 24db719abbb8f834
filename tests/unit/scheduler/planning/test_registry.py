"""Strategies of other packages, as an installed package registers them."""

from pathlib import Path

import pytest

from blockrelay.errors import UsageError
from blockrelay_scheduler.planning.problem import Wishes
from blockrelay_scheduler.planning.strategies.registry import names, place
from tests.support.plan_problems import device, problem

#: The one of docs/plans.md, and one whose answer is no plan.
MODULE = '''
from blockrelay_scheduler.planning.problem import Part, Placement, Problem

def everything_on_the_last(problem: Problem) -> Placement:
    """The whole model on the device that is listed last."""
    device = problem.fleet.devices[-1]
    part = Part(first=1, last=problem.blocks, devices=(device.id,), reason="it is the last one")
    return Placement(parts=(part,))

def half(problem: Problem) -> Placement:
    return Placement(parts=(Part(first=1, last=2, devices=("a",), reason=""),))
'''
SECONDS = {"CPU": [{1: 1.0}] * 4}


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `pip install` leaves of such a package."""
    (tmp_path / "their_strategies.py").write_text(MODULE)
    told = tmp_path / "their_strategies-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: their-strategies\nVersion: 1.0\n")
    registered = {"last": "everything_on_the_last", "half": "half", "gone": "nothing_of_this_name", "auto": "half"}
    lines = [f"{name} = their_strategies:{function}" for name, function in registered.items()]
    (told / "entry_points.txt").write_text("\n".join(["[blockrelay.strategies]", *lines]) + "\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_it_is_found_by_its_name_and_gets_the_problem() -> None:
    found = place("last", problem([device("a"), device("b")], SECONDS, wishes=Wishes(parts=2)))
    assert [(part.first, part.last, part.devices) for part in found.parts] == [(1, 4, ("b",))]
    assert {"last", "half", "gone"} <= set(names())


def test_its_answer_is_checked() -> None:
    with pytest.raises(UsageError, match="strategy half: block_3 is in no part"):
        place("half", problem([device("a")], SECONDS))


def test_one_that_cannot_be_loaded_is_said() -> None:
    with pytest.raises(
        UsageError, match=r"strategy gone cannot be loaded from their_strategies:nothing_of_this_name: "
    ):
        place("gone", problem([device("a")], SECONDS))


def test_nobody_takes_the_name_of_one_of_ours() -> None:
    found = place("auto", problem([device("a")], SECONDS))
    assert found.parts[-1].last == 4 and names().count("auto") == 1

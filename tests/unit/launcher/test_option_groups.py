"""Dataclasses as options of a command: what is on the command line, defaults, checks, and titles in the help."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Annotated, ClassVar

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from blockrelay.errors import UsageError
from blockrelay_launcher.option_groups import OptionGroup, with_option_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Size(OptionGroup):
    TITLE: ClassVar = "Size"
    width: Annotated[int, typer.Option(min=1, help="The width.")] = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Box(Size):
    TITLE: ClassVar = "Box"
    name: Annotated[str, typer.Argument(metavar="NAME")]
    lid: Annotated[bool, typer.Option("--lid", help="With a lid.")] = False
    inner: int = 7

    def check(self, given: Set[str]) -> None:
        if self.lid and "width" not in given:
            raise UsageError("--lid needs --width")


made: list[tuple[Box, bool]] = []
app = typer.Typer(add_completion=False)


@app.command()
@with_option_groups
def make(box: Box, loud: Annotated[bool, typer.Option("--loud", help="Make it loudly.")] = False) -> None:
    """Make a box."""
    made.append((box, loud))


def test_a_command_gets_its_groups_and_its_own_options() -> None:
    made.clear()
    for argv in (["a"], ["b", "--width", "5", "--lid", "--loud"]):
        assert CliRunner().invoke(app, argv, catch_exceptions=False).exit_code == 0
    assert made == [(Box(name="a"), False), (Box(name="b", width=5, lid=True), True)]


def test_a_group_is_checked_with_what_is_on_the_command_line() -> None:
    made.clear()
    with pytest.raises(UsageError, match="--lid needs --width"):
        CliRunner().invoke(app, ["c", "--lid"], catch_exceptions=False)
    assert CliRunner().invoke(app, ["c", "--lid", "--width", "3"], catch_exceptions=False).exit_code == 0
    assert [box.width for box, _ in made] == [3], "it has its default value, and is given"
    assert CliRunner().invoke(app, ["c", "--width", "0"]).exit_code == 2
    assert CliRunner().invoke(app, ["c", "--inner", "1"]).exit_code == 2, "a field without an option is none"


def test_the_help_has_each_option_under_the_title_of_the_class_that_adds_it() -> None:
    command = get_command(app)
    titles = {one.name: getattr(one, "rich_help_panel", None) for one in command.params}
    assert titles == {"name": "Box", "width": "Size", "lid": "Box", "loud": None}
    assert [one.name for one in command.params] == ["width", "name", "lid", "loud"]
    assert command.help == "Make a box."

"""docs/architecture.md is true: its tree, the places in the code that it names. Its list of modules is generated."""

import re

from docs.generate.modules import BEGIN
from tests.support.code_places import PLACE, is_there
from tests.support.project import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
BY_HAND = PAGE.split(BEGIN)[0]
PLACES = re.findall(f"`{PLACE.pattern}`", BY_HAND)


def test_every_place_that_it_names_is_in_the_code() -> None:
    for path, name in PLACES:
        assert is_there(path, name), f"{path} {name}"


def test_every_step_names_a_place() -> None:
    steps = re.findall(r"^\d+\. .*$(?:\n   .*$)*", BY_HAND, re.M)
    assert len(steps) > 50
    for step in steps:
        assert any(f"`{path} {name}`" in step or (path.endswith(".lua") and path in step) for path, name in PLACES), (
            step
        )


def test_every_folder_of_the_tree_exists_and_every_service_is_in_it() -> None:
    tree = PAGE.split("## Folders")[1].split("```")[1].removeprefix("text\n")
    shown: set[str] = set()
    parent = ""
    for line in tree.splitlines():
        name = line.split()[0]
        if line.startswith(" "):
            inside = [ROOT / parent, *(ROOT / parent).glob("blockrelay_*")]
            assert any((folder / name).is_dir() for folder in inside), f"{parent}{name}"
        else:
            parent = name
            assert (ROOT / name).is_dir(), name
        shown.add(name)
    for folder in (ROOT / "services").iterdir():
        assert f"services/{folder.name}/" in shown

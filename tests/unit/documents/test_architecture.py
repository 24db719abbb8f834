"""docs/architecture.md and docs/modules.md are true: the tree of folders, and the places in the code that they name."""

import re

import pytest

from docs.generate.modules import BEGIN
from tests.support.code_places import PLACE, is_there
from tests.support.project import ROOT

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
#: Without the list of modules, which is generated.
WALK = (ROOT / "docs" / "modules.md").read_text().split(BEGIN)[0]
RECIPES = {
    part.split("\n", 1)[0]: part for part in re.split(r"^### ", ARCHITECTURE.split("## Recipes")[1], flags=re.M)[1:]
}


def places(text: str) -> list[tuple[str, str]]:
    """Returns file and name of each place in the code that a text names."""
    return re.findall(f"`{PLACE.pattern}`", text)


def test_every_place_that_they_name_is_in_the_code() -> None:
    assert len(places(ARCHITECTURE)) > 40 and len(places(WALK)) > 100
    for path, name in places(ARCHITECTURE) + places(WALK):
        assert is_there(path, name), f"{path} {name}"


def test_every_step_of_the_walk_names_a_place() -> None:
    steps = re.findall(r"^\d+\. .*$(?:\n   .*$)*", WALK, re.M)
    assert len(steps) > 50
    for step in steps:
        assert any(name or path.endswith(".lua") for path, name in places(step)), step


def test_the_page_is_read_in_one_sitting() -> None:
    assert len(ARCHITECTURE.splitlines()) <= 300
    request_id = ARCHITECTURE.split("## One request\n")[1].split("\n## ")[0]
    assert len(request_id.strip().splitlines()) <= 40


@pytest.mark.parametrize("recipe", ["A sampling parameter", "A model family", "A metric", "A kind of device"])
def test_a_recipe_names_a_file_in_each_step_and_few_of_them(recipe: str) -> None:
    steps = re.findall(r"^\d+\. .*$", RECIPES[recipe], re.M)
    assert 3 <= len(steps) <= 6
    for step in steps:
        assert places(step) or all((ROOT / name).exists() for name in re.findall(r"`(deploy/[\w/.]+)`", step)), step
        assert re.search(r"`[\w/]+\.py", step), step


def test_every_folder_of_the_tree_exists_and_every_service_is_in_it() -> None:
    tree = ARCHITECTURE.split("## Folders")[1].split("```")[1].removeprefix("text\n")
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

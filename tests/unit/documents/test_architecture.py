"""docs/architecture.md is true."""

from tests.support.project import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()


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

"""docs/architecture.md is true: its tree, the places in the code that it names. Its list of modules is generated."""

import ast
import re
from pathlib import Path

from docs.generate.modules import BEGIN, ROOTS
from tests.support.project import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
BY_HAND = PAGE.split(BEGIN)[0]
#: `worker/engine/loop.py Engine.run`, `shared/protocol/transitions/claim.lua`, `native/matmul.h multiply`.
PLACES = re.findall(rf"`((?:{'|'.join(ROOTS)})/[\w./]+\.(?:py|lua|h|cpp))(?: ([\w.]+))?`", BY_HAND)


def names_in(file: Path) -> set[str]:
    """What a module defines: functions, classes, `Class.method`, and constants."""

    def defined(node: ast.AST, prefix: str) -> set[str]:
        found: set[str] = set()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found |= {prefix + child.name} | defined(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                found |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
        return found

    return defined(ast.parse(file.read_text()), "")


def test_every_place_that_it_names_is_in_the_code() -> None:
    for path, name in PLACES:
        root, _, inside = path.partition("/")
        file = ROOTS[root] / inside
        assert file.is_file(), path
        if name and file.suffix == ".py":
            assert name in names_in(file), f"{path} {name}"
        elif name:
            assert re.search(rf"\b{name}\(", file.read_text()), f"{path} {name}"


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

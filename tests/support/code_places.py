"""Places in the code as documents write them: `worker/engine/loop.py Engine.run`."""

import ast
import re
from functools import cache
from pathlib import Path

from docs.generate.modules import ROOTS

PLACE = re.compile(rf"((?:{'|'.join(ROOTS)})/[\w./]+\.(?:py|lua|h|cpp))(?: ([\w.]+))?")


def is_there(path: str, name: str) -> bool:
    """Whether there is such a file, and such a name in it unless that is empty."""
    root, _, inside = path.partition("/")
    file = ROOTS[root] / inside
    if not file.is_file():
        return False
    if name and file.suffix == ".py":
        return name in names_in(file)
    return not name or re.search(rf"\b{name}\(", file.read_text()) is not None


@cache
def names_in(file: Path) -> frozenset[str]:
    """What a module defines: functions, classes, `Class.method`, `Class.field`, and constants."""

    def defined(node: ast.AST, prefix: str) -> set[str]:
        found: set[str] = set()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found |= {prefix + child.name} | defined(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                found |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
        return found

    return frozenset(defined(ast.parse(file.read_text()), ""))

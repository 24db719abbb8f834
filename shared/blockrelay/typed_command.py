"""Commands and paths in messages, as the reader can type them: the environment that has them is often not activated.

Help texts and documents say `blockrelay` alone; what a process says of itself says how it was started.
"""

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path


def typed(words: str) -> str:
    """`blockrelay WORDS` for a shell in this folder: with the path of our program where the name alone is not it."""
    return f"{program('blockrelay')} {words}"


def program(name: str, *, scripts: Path | None = None) -> str:
    """The program `name` of this environment (of its folder of `scripts`) for a shell in this folder."""
    ours = (scripts or Path(sysconfig.get_path("scripts"))) / name
    found = shutil.which(name)
    if found is not None and (not ours.exists() or os.path.samefile(found, ours)):
        return name
    if not ours.exists():  # run from a folder, or by Python alone
        return f"{typed_path(Path(sys.executable))} -m {'blockrelay_launcher' if name == 'blockrelay' else name}"
    path = typed_path(ours)
    return path if "/" in path else f"./{path}"


def typed_path(path: Path) -> str:
    """A path for a shell in this folder: relative to it where that is shorter."""
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):  # this folder is gone, or the path is on another drive
        return shlex.quote(str(path))
    return shlex.quote(min(str(path), relative, key=len))

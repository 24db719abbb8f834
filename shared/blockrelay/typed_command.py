"""Writes commands and paths in messages so that users can type them: the Python environment is often not activated.

Help texts and documents say only `blockrelay`; messages of a process name the program that started it.
"""

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path


def typed(words: str) -> str:
    """Returns `blockrelay WORDS` for a shell in the current folder, with the program's path if that is needed.

    `words` are used as they are, so paths in them must be quoted (`typed_path`).
    """
    return f"{program('blockrelay')} {words}"


def program(name: str, *, scripts: Path | None = None) -> str:
    """Returns how a shell in the current folder calls the program `name` of this environment.

    `scripts`: the folder of the environment's programs, for tests.
    """
    ours = (scripts or Path(sysconfig.get_path("scripts"))) / name
    on_path = shutil.which(name)
    if on_path is not None and (not ours.exists() or os.path.samefile(on_path, ours)):
        return name
    if not ours.exists():  # run from a folder of sources, or with `python -m`
        return f"{typed_path(Path(sys.executable))} -m {'blockrelay_launcher' if name == 'blockrelay' else name}"
    path = typed_path(ours)
    return path if "/" in path else f"./{path}"


def typed_path(path: Path) -> str:
    """Returns a path, quoted for a shell in the current folder, relative to that folder where this is shorter."""
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):  # the current folder is gone, or the path is on another drive
        return shlex.quote(str(path))
    return shlex.quote(min(str(path), relative, key=len))

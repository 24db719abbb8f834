"""The check that this environment has no more than one ONNX Runtime. It imports none."""

import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution
from pathlib import Path

from blockrelay.errors import UsageError


def check_one_onnxruntime(installed: Iterable[Distribution] | None = None) -> None:
    """Raises UsageError naming the distributions if more than one has the package `onnxruntime`. `installed`: the
    distributions to look at; None, or an empty list: those of this environment. Only names that begin with
    `onnxruntime` count.

    `onnxruntime-gpu`, `onnxruntime-directml` and others overwrite files of `onnxruntime`: which of them runs, and which
    devices it knows, is then a matter of chance. Plug-ins (`onnxruntime-ep-...`) have packages of their own.
    """
    names = sorted({name for one in installed or _candidates() if (name := _name(one)) and _has_package(one)})
    if len(names) > 1:
        raise UsageError(
            f"{' and '.join(names)} are installed in one environment and overwrite each other: uninstall them all, "
            "then install one of them"
        )


def _candidates() -> Iterator[Distribution]:
    """Distributions whose names begin as ONNX Runtimes' do, by their folders: the metadata of all that is
    installed take several times as long to read, for every device."""
    for place in sys.path:
        for kind in ("dist-info", "egg-info"):
            yield from map(Distribution.at, Path(place or ".").glob(f"[oO]nnxruntime*.{kind}"))


def _name(one: Distribution) -> str:
    """Returns the normalised name of a distribution that may be an ONNX Runtime; empty for all others."""
    name = str(one.metadata["Name"]).lower().replace("_", "-")
    return name if name.startswith("onnxruntime") else ""


def _has_package(one: Distribution) -> bool:
    return any(file.parts[0] == "onnxruntime" for file in one.files or ())

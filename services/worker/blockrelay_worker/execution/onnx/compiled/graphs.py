"""Graphs as ONNX Runtime has optimised them, kept on disk from one start to the next.

Weights are inputs, so a kept graph is as small as its source. It is used only for the same graph, on the same device,
with the same versions of ONNX Runtime and the provider.
"""

import contextlib
import hashlib
import json
import platform
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from blockrelay.observability.logs import get as log
from blockrelay_worker.execution.onnx.compiled.cache_folder import CacheFolder, private_folder
from blockrelay_worker.policy import SHADER_CACHE_BYTES

#: Part of the key: changes with the format in which graphs are kept.
VERSION = 1

#: Makes a session of (graph, file to write the optimised graph to, whether the graph is already optimised).
Make = Callable[[bytes, Path | None, bool], Any]


class CompiledGraphs:
    """A cache of optimised graphs. Used by one thread at a time."""

    def __init__(self, folder: CacheFolder) -> None:
        self._folder = folder
        #: Sessions made of a kept graph, and sessions that had to optimise theirs.
        self.hits = self.made = 0

    def session(self, graph: bytes, about: Sequence[str], make: Make, *, again: bool) -> Any:
        """Returns a session of `graph` on the device that `about` describes: that of a kept graph, or a new one whose
        optimised graph is kept.

        `about` must name the device, the versions of ONNX Runtime and the provider, and options that change the
        optimised graph: a kept graph is used whenever graph, machine type and `about` are equal. `again`: a session
        that saves its graph must not be used, so a second one is made of the saved graph, if that can be read.

        Raises what `make` raises for the graph as it is, or for that second session.
        """
        key = key_of(graph, about)
        if (kept := self._folder.get(key)) is not None:
            try:
                made = make(kept, None, True)
            except Exception as error:  # noqa: BLE001 ONNX Runtime's own exception types have no public common base
                self._disbelieved(key, error)
            else:
                self.hits += 1
                return made
        self.made += 1
        optimised = None
        with self._folder.scratch() as path:
            try:
                made = make(graph, path, False)
            except Exception:  # noqa: BLE001 perhaps it is the disk that is full
                return make(graph, None, False)
            with contextlib.suppress(OSError):
                optimised = path.read_bytes()
        if optimised is None:
            return made
        self._folder.put(key, optimised)
        if again:
            del made
            return make(optimised, None, True)
        return made

    def own_folder(self, name: str, about: Sequence[str]) -> Path | None:
        """Returns a folder, made if missing, for a provider with a cache of its own, called `name`. Each `about`
        (device and versions) has another folder. None if it cannot be made or others can write to it."""
        return private_folder(self._folder.root.parent / f"{name}-{_digest(json.dumps(list(about)).encode())[:16]}")

    def _disbelieved(self, key: str, error: Exception) -> None:
        log().warning("CACHE_NOT_BELIEVED", path=str(self._folder.root), reason=str(error)[:200])
        self._folder.drop(key)


def key_of(graph: bytes, about: Sequence[str]) -> str:
    """Returns the key of a kept graph: of its source `graph`, the machine type and `about`.

    `about` has all else that decides the optimised graph: device, versions and options.
    """
    return json.dumps([VERSION, _digest(graph), platform.machine(), *about])


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def compiled_graphs(root: Path, environment: MutableMapping[str, str]) -> CompiledGraphs | None:
    """Returns the cache under `root`; None if its folder cannot be made, or others own it or can write to it.

    Sets variables in `environment`, which must be this process's own, so that the drivers it loads keep their shaders
    there too. Variables that are set already stay.
    """
    graphs, shaders = private_folder(root / "graphs"), private_folder(root / "shaders")
    for name, value in ({} if shaders is None else shader_settings(shaders)).items():
        environment.setdefault(name, value)
    return None if graphs is None else CompiledGraphs(CacheFolder(graphs))


def shader_settings(folder: Path) -> Mapping[str, str]:
    """Returns environment variables with which Mesa's and NVIDIA's drivers keep compiled shaders in `folder`, which
    they check and bound themselves. Other drivers, those of Windows among them, have no such variables."""
    limit = str(SHADER_CACHE_BYTES)
    return {
        "MESA_SHADER_CACHE_DIR": str(folder),
        "MESA_SHADER_CACHE_MAX_SIZE": f"{SHADER_CACHE_BYTES >> 20}M",
        "CUDA_CACHE_PATH": str(folder / "cuda"),
        "CUDA_CACHE_MAXSIZE": limit,
        "__GL_SHADER_DISK_CACHE_PATH": str(folder),
        "__GL_SHADER_DISK_CACHE_SIZE": limit,
    }

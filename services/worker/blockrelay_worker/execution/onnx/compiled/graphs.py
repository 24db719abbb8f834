"""Graphs as ONNX Runtime has optimised them, kept from one start to the next.

A graph has no weights in it (they are inputs), so a kept one is as small as what it was made of. It is taken for the
same graph alone, on the same device, by the same versions of ONNX Runtime and the provider.
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

#: Changes with the way that graphs are kept.
VERSION = 1
#: Of what drivers keep by their own ways.
_MOST_SHADER_BYTES = 512 << 20

#: A session of a graph. The path: where to write what it was optimised to; `optimised`: the graph was, once before.
Make = Callable[[bytes, Path | None, bool], Any]


class CompiledGraphs:
    """Used by one thread at a time."""

    def __init__(self, folder: CacheFolder) -> None:
        self._folder = folder
        #: Sessions whose graph was found, and those that were optimised here.
        self.found = self.made = 0

    def session(self, graph: bytes, about: Sequence[str], make: Make, *, again: bool) -> Any:
        """A session of the graph on the device that `about` describes. `again`: one that writes is not the one to use.

        Raises what `make` raises of the graph as it is.
        """
        key = key_of(graph, about)
        if (kept := self._folder.get(key)) is not None:
            try:
                made = make(kept, None, True)
            except Exception as error:  # noqa: BLE001 ONNX Runtime's own exception types have no public common base
                self._disbelieved(key, error)
            else:
                self.found += 1
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
        """For a provider that keeps what it compiles in its own way: one for this device and these versions."""
        return private_folder(self._folder.root.parent / f"{name}-{_digest(json.dumps(list(about)).encode())[:16]}")

    def _disbelieved(self, key: str, error: Exception) -> None:
        log().warning("CACHE_NOT_BELIEVED", path=str(self._folder.root), reason=str(error)[:200])
        self._folder.drop(key)


def key_of(graph: bytes, about: Sequence[str]) -> str:
    """Of everything that decides what a graph is optimised to."""
    return json.dumps([VERSION, _digest(graph), platform.machine(), *about])


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def compiled_graphs(root: Path, environment: MutableMapping[str, str]) -> CompiledGraphs | None:
    """What is kept under `root`; None where nothing can be.

    Names folders there in `environment`, this process' own, to the drivers that will be loaded and keep shaders, unless
    somebody has named others.
    """
    graphs, shaders = private_folder(root / "graphs"), private_folder(root / "shaders")
    for name, value in ({} if shaders is None else shader_settings(shaders)).items():
        environment.setdefault(name, value)
    return None if graphs is None else CompiledGraphs(CacheFolder(graphs))


def shader_settings(folder: Path) -> Mapping[str, str]:
    """Variables by which Mesa's and NVIDIA's drivers keep compiled shaders in `folder`, checked and bounded by them.
    Others, Windows' among them, have no such variables."""
    most = str(_MOST_SHADER_BYTES)
    return {
        "MESA_SHADER_CACHE_DIR": str(folder),
        "MESA_SHADER_CACHE_MAX_SIZE": f"{_MOST_SHADER_BYTES >> 20}M",
        "CUDA_CACHE_PATH": str(folder / "cuda"),
        "CUDA_CACHE_MAXSIZE": most,
        "__GL_SHADER_DISK_CACHE_PATH": str(folder),
        "__GL_SHADER_DISK_CACHE_SIZE": most,
    }

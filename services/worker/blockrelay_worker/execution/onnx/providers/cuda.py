"""NVIDIA's GPUs by CUDA, with `onnxruntime-gpu`. Written by its documents, never run by us."""

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import DTypeLike

from blockrelay.extras import how_to_install
from blockrelay_worker.execution.device_memory import default_budget
from blockrelay_worker.execution.onnx.providers.nvidia_driver import NvidiaGpu
from blockrelay_worker.execution.onnx.providers.provider import (
    Chosen,
    Provider,
    check_available,
    only_there,
    shrinking_arena,
)

#: What a loader says of a library that it does not find, on Linux.
_NOT_FOUND = re.compile(r"^(\S+): cannot open shared object file")
_LIBRARY = "onnxruntime_providers_cuda.dll" if sys.platform == "win32" else "libonnxruntime_providers_cuda.so"


class CudaProvider(Provider):
    """A GPU that CUDA shows."""

    name, ort_name = "cuda", "CUDAExecutionProvider"
    has_paged_attention = loads_beside = True
    _libraries_loaded = False

    def __init__(self, index: int, gpu: NvidiaGpu) -> None:
        """The device `cuda:<index>`, which is `gpu`."""
        self.device, self._index, self._gpu = f"cuda:{index}", index, gpu
        self.place = ("cuda", index)
        # CUDA's own order is by speed; this is nvidia-smi's, in which people count.
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        if not CudaProvider._libraries_loaded:
            with contextlib.redirect_stdout(sys.stderr):  # it prints
                ort.preload_dlls()
            CudaProvider._libraries_loaded = True

    @classmethod
    def check_installed(cls) -> None:
        """Raises UsageError where this ONNX Runtime has no CUDA."""
        check_available(cls, "onnxruntime-gpu")

    @property
    def card(self) -> str:
        """Its number depends on what a process is shown."""
        return self._gpu.uuid

    @property
    def identity(self) -> tuple[str, ...]:
        return (*super().identity, self._gpu.name, self._gpu.driver)

    def budget_bytes(self) -> int | None:
        """Of what was free when this was made."""
        free = self._gpu.free_bytes
        return None if free is None else default_budget(free)

    def lacks(self) -> str:
        """The library that CUDA's provider does not find; only behind a session that could not be made, since the
        provider must first be loaded by ONNX Runtime."""
        missing = missing_library(Path(ort.__file__).parent / "capi" / _LIBRARY)
        if not missing:
            return ""
        return (
            f"{self.device} needs {missing}, which is not here: the extra cuda has the libraries of CUDA "
            f"and cuDNN ({how_to_install('cuda')}), and NVIDIA's driver has libcuda"
        )

    captures = True

    def add_to(self, options: ort.SessionOptions, *, capture: bool = False) -> Sequence[Chosen]:
        only_there(options)
        # What a session has of weights goes back to the device with it, which the arena's memory does not.
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        chosen = {
            "device_id": str(self._index),
            "arena_extend_strategy": "kSameAsRequested",  # else the arena takes up to twice what is needed
            "use_tf32": "0",  # float32 with 10 bits of mantissa would be another type of floats
        }
        if capture:
            chosen["enable_cuda_graph"] = "1"
        return [(self.ort_name, chosen)]

    def empty(self, session: ort.InferenceSession, shape: Sequence[int], dtype: DTypeLike) -> ort.OrtValue:
        value = ort.OrtValue.ortvalue_from_shape_and_type(list(shape), np.dtype(dtype).type, "cuda", self._index)
        value.update_inplace(np.zeros(shape, dtype))
        return value

    def shrinking(self) -> ort.RunOptions | None:
        return shrinking_arena(f"gpu:{self._index}")


def missing_library(path: Path) -> str:
    """The name of the library that the loader does not find for the one at `path`; empty if it finds all of them."""
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        found = _NOT_FOUND.match(str(error))
        return Path(found[1]).name if found else f"what {path.name} needs ({error})"
    return ""

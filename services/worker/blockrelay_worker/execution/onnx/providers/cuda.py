"""NVIDIA's GPUs through CUDA, with `onnxruntime-gpu`. Written from its documents; never run by us."""

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import onnxruntime as ort

from blockrelay.extras import how_to_install
from blockrelay_worker.execution.device_memory import default_budget
from blockrelay_worker.execution.onnx.providers.nvidia_driver import NvidiaGpu
from blockrelay_worker.execution.onnx.providers.provider import Chosen, Provider, only_there, shrinking_arena

#: The error of Linux's loader for a missing library.
_NOT_FOUND = re.compile(r"^(\S+): cannot open shared object file")
_LIBRARY = "onnxruntime_providers_cuda.dll" if sys.platform == "win32" else "libonnxruntime_providers_cuda.so"


class CudaProvider(Provider):
    """A GPU that CUDA shows to this process."""

    name, ort_name, needs = "cuda", "CUDAExecutionProvider", "onnxruntime-gpu"
    has_paged_attention = loads_beside = True
    _libraries_loaded = False

    def __init__(self, index: int, gpu: NvidiaGpu) -> None:
        """Opens the device `cuda:<index>`, which is `gpu`, and loads CUDA's libraries once in a process.

        Sets CUDA_DEVICE_ORDER in this process's environment.
        """
        self.device, self._index, self._gpu = f"cuda:{index}", index, gpu
        self.place = ("cuda", index)
        # CUDA's own order is by speed; this one is nvidia-smi's, which operators see.
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        if not CudaProvider._libraries_loaded:
            with contextlib.redirect_stdout(sys.stderr):  # preload_dlls prints, and stdout is for results
                ort.preload_dlls()
            CudaProvider._libraries_loaded = True

    @property
    def card(self) -> str:
        """The GPU's UUID: its number depends on which GPUs a process may see."""
        return self._gpu.uuid

    @property
    def identity(self) -> tuple[str, ...]:
        return (*super().identity, self._gpu.name, self._gpu.driver)

    def budget_bytes(self) -> int | None:
        """Returns a share of the memory that was free when `gpu` was read; None if the driver does not say."""
        free = self._gpu.free_bytes
        return None if free is None else default_budget(free)

    def lacks(self) -> str:
        """Names a library that CUDA's provider needs and does not find; empty if there is none. Call it only after a
        session could not be made: ONNX Runtime must have loaded the provider before."""
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
        # Weights of a session then leave the device with it; memory of the arena would stay.
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        chosen = {
            "device_id": str(self._index),
            "arena_extend_strategy": "kSameAsRequested",  # else the arena takes up to twice the bytes that are needed
            "use_tf32": "0",  # TF32 has 10 bits of mantissa: known answers of float32 would not hold
        }
        if capture:
            chosen["enable_cuda_graph"] = "1"
        return [(self.ort_name, chosen)]

    def shrinking(self) -> ort.RunOptions | None:
        return shrinking_arena(f"gpu:{self._index}")


def missing_library(path: Path) -> str:
    """Returns the name of a library that the one at `path` needs and the loader does not find; empty if it finds
    all. Where the loader names none (not Linux, or another fault), it is the loader's message about `path`."""
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        match = _NOT_FOUND.match(str(error))
        return Path(match[1]).name if match else f"what {path.name} needs ({error})"
    return ""

"""The base class of execution providers: sessions of ONNX Runtime that run wholly on one device, and memory there.

ONNX Runtime falls back to its CPU provider without an error if a library is missing or a node has no kernel. Sessions
made here never do.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import onnxruntime as ort
from numpy.typing import DTypeLike, NDArray

from blockrelay.errors import UsageError
from blockrelay.extras import how_to_install
from blockrelay.host.memory import allowed_bytes, available_bytes
from blockrelay_worker.execution.onnx.compiled.graphs import CompiledGraphs

#: A provider's name, perhaps with options, as ONNX Runtime takes it.
Chosen = str | tuple[str, dict[Any, Any]]
#: Memory of a device, as ONNX Runtime's bindings name it: kind and number.
Place = tuple[str, int]
#: The memory of the host.
HOST: Place = ("cpu", 0)
#: How many steps a session is made for.
Steps = Literal["one", "few", "many"]
#: What ONNX Runtime writes to stderr: errors and worse (exceptions carry everything else), or nothing.
ERRORS, _NOTHING = 3, 4
_NO_CPU_FALLBACK = "session.disable_cpu_ep_fallback"
#: The option for the folder of external weights, for a graph that is given as bytes.
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
_RECORDS_ASSIGNMENT = "session.record_ep_graph_assignment_info"


class Provider(ABC):
    """One device of one execution provider. Used by one thread."""

    name: ClassVar[str]
    """The provider's name for people: the part of `webgpu:0` before the colon."""
    device: str
    """The device's name for people, `webgpu:0` for example."""
    ort_name: ClassVar[str]
    """ONNX Runtime's name for the provider."""
    needs: ClassVar[str] = ""
    """The package with an ONNX Runtime that has the provider, for messages; empty if every ONNX Runtime takes it."""
    has_paged_attention: ClassVar[bool] = False
    """True if it has kernels for `com.microsoft.PagedAttention` in float16."""
    adds_in_float16: ClassVar[bool] = False
    """True if its matmuls of float16 add up in float16 too, which makes long sums inexact."""
    saves_graphs: ClassVar[bool] = True
    """True if ONNX Runtime can save the optimised graph."""
    compiled: CompiledGraphs | None = None
    """Optimised graphs kept from earlier starts; None: every session optimises its own graph."""
    fuses_last: ClassVar[bool] = False
    """True if it fuses nodes after the point at which the graph can be saved, but not in a session that saves."""
    waits_for_outputs: bool = False
    """True if each output that comes to the host costs a wait (1 ms on an H200), so that one is faster than many."""
    captures: bool = False
    """True if decode steps are recorded on the device and replayed."""
    loads_beside: ClassVar[bool] = False
    """True if a session may be made while another one runs."""
    threads: int = 1
    """CPU threads for graphs that others made."""

    place: Place | None = None
    """The memory in which outputs can stay on the device; None if all outputs come to the host."""

    @abstractmethod
    def add_to(self, options: ort.SessionOptions, *, capture: bool = False) -> Sequence[Chosen]:
        """Selects the device in a session's `options`; returns the providers to pass beside them. `capture`: runs of
        the session are recorded, under the run option `gpu_graph_id`."""
        ...

    @classmethod
    def check_installed(cls) -> None:
        """Raises UsageError if this ONNX Runtime was built without the provider."""
        if cls.ort_name not in ort.get_available_providers():
            raise UsageError(
                f"{cls.name} needs {cls.needs} in an environment of its own: "
                f"{how_to_install(cls.name, pip='ITS/bin/pip')}, and --gpu-python for the worker"
            )

    def empty(self, session: ort.InferenceSession, shape: Sequence[int], dtype: DTypeLike) -> ort.OrtValue:
        """Returns zeros on the device. The memory lives as long as the value, even when the session has gone. Raises
        UsageError for more bytes than the device has in one piece, where ONNX Runtime does not report it."""
        zeros = np.zeros(shape, dtype)
        if self.place in (None, HOST):  # without a copy, and of pages that the system gives once they are written
            return ort.OrtValue.ortvalue_from_numpy(zeros)
        value = ort.OrtValue.ortvalue_from_shape_and_type(list(shape), zeros.dtype.type, *self.place)
        value.update_inplace(zeros)
        return value

    @property
    def card(self) -> str:
        """The device's name among the workers of this host, so that each takes another device."""
        return self.device

    @property
    def identity(self) -> tuple[str, ...]:
        """All that decides the bits it computes: a part of the numerics id."""
        return (self.ort_name, ort.__version__)

    def budget_bytes(self) -> int | None:
        """Returns how many bytes of the device's memory may be used by default; None where the free memory is
        unknown."""
        return None

    def lacks(self) -> str:
        """Returns what this machine lacks, after a session could not be made; empty if nothing is known to be
        missing."""
        return ""

    def session(self, graph: bytes, *, quiet: bool = False, capture: bool = False) -> ort.InferenceSession:
        """Returns a session with every node of `graph` on the device. `quiet`: it may fail, so nothing is written to
        stderr and no graph is kept. `capture`: runs of the session are to be recorded on the device.

        Raises what ONNX Runtime raises if a node cannot be there. Raises UsageError if this machine lacks something, or
        if ONNX Runtime left the provider out.
        """

        def make(graph: bytes, saved: Path | None, optimised: bool) -> ort.InferenceSession:
            return self._made(graph, saved, quiet=quiet, capture=capture, optimised=optimised)

        if quiet or self.compiled is None or not self.saves_graphs:
            return make(graph, None, False)
        about = (*self.identity, f"{capture=}")
        return self.compiled.session(graph, about, make, again=self.fuses_last)

    def mixed_session(self, graph: bytes, weights: Path, steps: Steps = "many") -> ort.InferenceSession:
        """Returns a session, for `steps` steps, of a graph that others made, whose weights are files in the folder
        `weights`. Nodes without a kernel on the device run on ONNX Runtime's CPU provider: such graphs compute with
        integers that belong there.

        Raises what ONNX Runtime raises for a graph that it refuses, and UsageError as `session` does.
        `nodes_by_provider` counts the nodes of each.
        """
        options = self._options(quiet=True)
        options.intra_op_num_threads = self.threads
        # Each session has threads of its own; those of one block would spin while the next one computes.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry(WEIGHTS_FOLDER, str(weights))
        # One block runs at a time, so one arena is enough: arenas of their own would each keep their largest step.
        _register_shared_arena()
        options.add_session_config_entry("session.use_env_allocators", "1")
        self._prepare_for(steps, options)
        chosen = self.add_to(options)
        options.add_session_config_entry(_NO_CPU_FALLBACK, "0")
        options.add_session_config_entry(_RECORDS_ASSIGNMENT, "1")
        return self._opened(graph, options, chosen)

    def _prepare_for(self, steps: Steps, options: ort.SessionOptions) -> None:
        """Limits what ONNX Runtime prepares to what pays within `steps`: reordered copies of the weights, which help
        matmuls of many rows, only for many steps."""
        if steps != "many":
            options.add_session_config_entry("session.disable_prepacking", "1")

    def _made(
        self, graph: bytes, saved: Path | None, *, quiet: bool, capture: bool, optimised: bool
    ) -> ort.InferenceSession:
        """Returns a session. `saved`: the file to write the optimised graph to; `optimised`: `graph` is already
        optimised."""
        options = self._options(quiet=quiet)
        if optimised:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        if saved is not None:
            options.optimized_model_filepath = str(saved)
        return self._opened(graph, options, self.add_to(options, capture=capture))

    @staticmethod
    def _options(*, quiet: bool) -> ort.SessionOptions:
        options = ort.SessionOptions()
        options.log_severity_level = _NOTHING if quiet else ERRORS
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        return options

    def _opened(self, graph: bytes, options: ort.SessionOptions, chosen: Sequence[Chosen]) -> ort.InferenceSession:
        """Returns a session with these options. Raises UsageError if ONNX Runtime left the provider out."""
        try:
            made = ort.InferenceSession(graph, options, providers=list(chosen) or None, enable_fallback=0)
        except Exception as error:
            if lacking := self.lacks():
                raise UsageError(lacking) from error
            raise
        providers = made.get_providers()
        if providers[0] != self.ort_name:
            raise UsageError(self.lacks() or f"ONNX Runtime gave {providers[0]} where {self.ort_name} was asked for")
        return made

    def memory(self) -> tuple[int, int] | None:
        """Returns the bytes in use on the device and its bytes in all; None where the provider does not say."""
        return None

    def shrinking(self) -> ort.RunOptions | None:
        """Returns options for a run after which the session gives back memory that it does not use; None where it
        cannot."""
        return None

    def upload(self, session: ort.InferenceSession, array: NDArray[Any]) -> ort.OrtValue:
        """Returns a copy of `array` on the device. Raises UsageError as `empty` does, if it is too large."""
        value = self.empty(session, array.shape, array.dtype)
        value.update_inplace(np.ascontiguousarray(array))
        return value


class CpuProvider(Provider):
    """ONNX Runtime's own CPU kernels: the reference, also used in tests. A worker of the class gpu never serves with
    it."""

    name, ort_name, loads_beside = "cpu", "CPUExecutionProvider", True
    device = "cpu"
    place = HOST

    def add_to(self, options: ort.SessionOptions, *, capture: bool = False) -> Sequence[Chosen]:
        return [self.ort_name]

    def _prepare_for(self, steps: Steps, options: ort.SessionOptions) -> None:
        """Also avoids the float32 copies of float16 weights, which take twice their memory and seconds for each GB: for
        one step each matrix is widened when it is used, and nothing is kept."""
        super()._prepare_for(steps, options)
        if steps == "one":
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.enable_cpu_mem_arena = False

    def memory(self) -> tuple[int, int]:
        return max(0, allowed_bytes() - available_bytes()), allowed_bytes()

    def shrinking(self) -> ort.RunOptions | None:
        return shrinking_arena("cpu:0")


@cache
def _register_shared_arena() -> None:
    """Registers one arena of host memory, shared by all sessions with `session.use_env_allocators`. Once in a
    process."""
    place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(place, ort.OrtArenaCfg(0, -1, -1, -1))


def shrinking_arena(device: str) -> ort.RunOptions:
    """Returns options for a run after which the arena of `device` gives back unused memory.

    `device` is ONNX Runtime's name in the option `memory.enable_memory_arena_shrinkage`: `cpu:0`, or `gpu:1` for CUDA.
    """
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", device)
    return options


def only_there(options: ort.SessionOptions) -> None:
    """Makes a node without a kernel on the device an error, instead of a node of the CPU provider."""
    options.add_session_config_entry(_NO_CPU_FALLBACK, "1")


def nodes_by_provider(session: ort.InferenceSession) -> dict[str, int]:
    """Returns how many nodes of a `mixed_session` each provider has, by ONNX Runtime's names; empty where ONNX Runtime
    is too old to say."""
    try:
        parts = session.get_provider_graph_assignment_info()
    except (AttributeError, RuntimeError):
        return {}
    return Counter(part.ep_name for part in parts for _ in part.get_nodes())

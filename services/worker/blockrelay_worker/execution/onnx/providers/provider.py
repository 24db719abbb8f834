"""What an execution provider of ONNX Runtime does for us: sessions that run on one device, wholly or not at all, and
memory there.

A session of ONNX Runtime falls back to its CPU provider in silence, where a library is missing or a node has no kernel:
here it never does.
"""

from abc import ABC, abstractmethod
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

#: A provider by its name, or with options, as ONNX Runtime takes it.
Chosen = str | tuple[str, dict[Any, Any]]
#: Memory of a device as a binding of ONNX Runtime names it.
Place = tuple[str, int]
#: For how many steps a session is made.
Steps = Literal["one", "few", "many"]
#: What ONNX Runtime writes to stderr: errors and worse (everything else is told by exceptions), or nothing.
ERRORS, _NOTHING = 3, 4
_NO_CPU_FALLBACK = "session.disable_cpu_ep_fallback"
#: Where weights beside a graph lie that is given as bytes.
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
_RECORDS_ASSIGNMENT = "session.record_ep_graph_assignment_info"


class Provider(ABC):
    """One device by one provider. Used by one thread."""

    name: ClassVar[str]
    """As people write it: the part of `webgpu:0` before the colon."""
    device: str
    """As people write it, `webgpu:0` for example."""
    ort_name: ClassVar[str]
    has_paged_attention: ClassVar[bool] = False
    """It has kernels for `com.microsoft.PagedAttention`, in float16."""
    adds_in_float16: ClassVar[bool] = False
    """What its products of float16 add up, they add up in float16 too, so that long sums lose what a float16 holds."""
    saves_graphs: ClassVar[bool] = True
    """ONNX Runtime can write down what it optimises a graph to."""
    compiled: CompiledGraphs | None = None
    """What graphs were optimised to before; None: every session optimises its own."""
    fuses_last: ClassVar[bool] = False
    """Behind what can be written down it fuses nodes, but not in a session that writes."""
    waits_for_outputs: bool = False
    """Each output that comes down is waited for (1 ms on an H200), so that one is better than many."""
    captures: bool = False
    """Decode steps are recorded there and repeated."""
    loads_beside: ClassVar[bool] = False
    """A session may be made while another one runs."""
    threads: int = 1
    """Of the CPU, for graphs that others made."""

    place: Place | None = None
    """Where outputs stay that are not to come down; None where all do."""

    @abstractmethod
    def add_to(self, options: ort.SessionOptions, *, capture: bool = False) -> Sequence[Chosen]:
        """Choose the device for a session with these options; the providers to pass beside them. `capture`: its runs
        are recorded, by the option `gpu_graph_id` of a run."""
        ...

    @abstractmethod
    def empty(self, session: ort.InferenceSession, shape: Sequence[int], dtype: DTypeLike) -> ort.OrtValue:
        """Zeros on the device, in memory that lives as long as the value, even when the session has gone. Raises
        UsageError for more than can be in one piece there, where ONNX Runtime says nothing of it."""
        ...

    @property
    def card(self) -> str:
        """What workers of this host call the device among each other, so that each has its own."""
        return self.device

    @property
    def identity(self) -> tuple[str, ...]:
        """What decides how it computes: part of the numerics id."""
        return (self.ort_name, ort.__version__)

    def budget_bytes(self) -> int | None:
        """How much of the device's memory may be used when nobody says; None where it does not tell what is free."""
        return None

    def lacks(self) -> str:
        """What this machine lacks, where a session could not be made; empty: nothing that is known."""
        return ""

    def session(self, graph: bytes, *, quiet: bool = False, capture: bool = False) -> ort.InferenceSession:
        """A session that has every node of the graph on the device. Raises what ONNX Runtime raises where one cannot be
        there, UsageError where this machine lacks something. `quiet`: it may fail; `capture` as of `add_to`."""

        def make(graph: bytes, saved: Path | None, optimised: bool) -> ort.InferenceSession:
            return self._made(graph, saved, quiet=quiet, capture=capture, optimised=optimised)

        if quiet or self.compiled is None or not self.saves_graphs:
            return make(graph, None, False)
        about = (*self.identity, f"{capture=}")
        return self.compiled.session(graph, about, make, again=self.fuses_last)

    def mixed_session(self, graph: bytes, weights: Path, steps: Steps = "many") -> ort.InferenceSession:
        """A session, for so many steps, of a graph that others made, with weights in files of the folder `weights`.
        What the device has no kernel for is computed by ONNX Runtime's CPU provider: such graphs have integers in them
        that are at home there.

        Raises as `session` does. `nodes_by_provider` counts what is where.
        """
        options = self._options(quiet=True)
        options.intra_op_num_threads = self.threads
        # Each session has threads of its own, and those of one block would turn in circles while the next one computes.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry(WEIGHTS_FOLDER, str(weights))
        # One block runs at a time. With an arena each, all sessions together would keep the largest step of every one.
        _register_shared_arena()
        options.add_session_config_entry("session.use_env_allocators", "1")
        self._prepare_for(steps, options)
        chosen = self.add_to(options)
        options.add_session_config_entry(_NO_CPU_FALLBACK, "0")
        options.add_session_config_entry(_RECORDS_ASSIGNMENT, "1")
        return self._opened(graph, options, chosen)

    def _prepare_for(self, steps: Steps, options: ort.SessionOptions) -> None:
        """Have ONNX Runtime prepare no more than pays within so many steps: a copy of the weights in the order that
        products of many rows like is for many."""
        if steps != "many":
            options.add_session_config_entry("session.disable_prepacking", "1")

    def _made(
        self, graph: bytes, saved: Path | None, *, quiet: bool, capture: bool, optimised: bool
    ) -> ort.InferenceSession:
        """`saved`: where what the graph was optimised to is written."""
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
        try:
            made = ort.InferenceSession(graph, options, providers=list(chosen) or None, enable_fallback=0)
        except Exception as error:
            if lacking := self.lacks():
                raise UsageError(lacking) from error
            raise
        found = made.get_providers()
        if found[0] != self.ort_name:
            raise UsageError(self.lacks() or f"ONNX Runtime gave {found[0]} where {self.ort_name} was asked for")
        return made

    def memory(self) -> tuple[int, int] | None:
        """Bytes of the device that are in use, and that there are; None where nobody tells."""
        return None

    def shrinking(self) -> ort.RunOptions | None:
        """Options of a run behind which the session gives memory back that it does not use; None where nobody can."""
        return None

    def upload(self, session: ort.InferenceSession, array: NDArray[Any]) -> ort.OrtValue:
        """A copy of `array` on the device."""
        value = self.empty(session, array.shape, array.dtype)
        value.update_inplace(np.ascontiguousarray(array))
        return value


class CpuProvider(Provider):
    """ONNX Runtime's own CPU kernels: a reference, and for tests. Never the class gpu of a worker that serves."""

    name, ort_name, loads_beside = "cpu", "CPUExecutionProvider", True
    device = "cpu"
    place = ("cpu", 0)

    def add_to(self, options: ort.SessionOptions, *, capture: bool = False) -> Sequence[Chosen]:
        return [self.ort_name]

    def empty(self, session: ort.InferenceSession, shape: Sequence[int], dtype: DTypeLike) -> ort.OrtValue:
        return ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype))

    def _prepare_for(self, steps: Steps, options: ort.SessionOptions) -> None:
        """float16 is computed in float32. A copy of all weights in it is prepared, which takes twice their memory and
        seconds for each GB. For one step each matrix is widened when it is its turn, and nothing is kept."""
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
    """Memory of the host that all sessions of this process may share, which have `session.use_env_allocators`."""
    place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(place, ort.OrtArenaCfg(0, -1, -1, -1))


def shrinking_arena(device: str) -> ort.RunOptions:
    """Of a run behind which the arena of `device` gives back what nobody uses."""
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", device)
    return options


def only_there(options: ort.SessionOptions) -> None:
    """A node without a kernel on the device is an error, not a node of the CPU provider."""
    options.add_session_config_entry(_NO_CPU_FALLBACK, "1")


def nodes_by_provider(session: ort.InferenceSession) -> dict[str, int]:
    """How many nodes of a `mixed_session` are with which provider, by ONNX Runtime's names; empty where an older one
    does not tell."""
    try:
        parts = session.get_provider_graph_assignment_info()
    except (AttributeError, RuntimeError):
        return {}
    found: dict[str, int] = {}
    for part in parts:
        found[part.ep_name] = found.get(part.ep_name, 0) + len(part.get_nodes())
    return found


def check_available(provider: type[Provider], package: str, *, place: str = "") -> None:
    """Raises UsageError where this ONNX Runtime has not been built with the provider, which `package` has (for people
    at `place` alone)."""
    if provider.ort_name not in ort.get_available_providers():
        raise UsageError(
            f"{provider.name} needs {place}{package} in an environment of its own: "
            f"{how_to_install(provider.name, pip='ITS/bin/pip')}, and --gpu-python for the worker"
        )

"""Decode steps that a device has recorded and replays: the same commands, on new numbers in the same memory.

A replay saves what a step costs beside the computing. Each bucket (`buckets`) has one recorded step: those of
`all_buckets` are made in order when a stage is loaded, the rest when they first come. Two known steps, one that records
and one that replays, must give what an unrecorded step gives, on spare pages: a replay of old numbers would write into
the pages of other requests. If they differ, or anything else fails, no step is recorded any more, and the stage
continues without.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from blockrelay.block_folder.model import ModelConfig
from blockrelay.observability.logs import get as log
from blockrelay_worker.execution.batch import Segment
from blockrelay_worker.execution.onnx.batches import batch_inputs
from blockrelay_worker.execution.onnx.bound.session import Arrays
from blockrelay_worker.execution.onnx.compiled.buckets import Bucket, all_buckets, bucket_for, filled
from blockrelay_worker.execution.onnx.graphs.flavours import PLAIN, Flavour
from blockrelay_worker.execution.onnx.known_answers import row_error, worst
from blockrelay_worker.execution.onnx.providers.provider import Place, Provider
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.kernels.specification import PAGE
from blockrelay_worker.policy import MAX_COPIED_BYTES, MAX_GRAPHS, RECORDING_S

#: Pages of the pools that no run gets, for known steps and for the sequences that fill a bucket.
SPARE_PAGES = 8
#: Known steps of a bucket: the first records, the second replays.
_CHECKS = 2

#: Inputs of a step that do not follow from its segments, by name.
Given = Mapping[str, NDArray[Any]]


@dataclass(slots=True)
class _Graph:
    """A recorded step of one bucket. `arrays`: the present contents of `inputs` on the device."""

    number: int
    session: Any
    binding: Any
    options: Any
    inputs: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    outputs: dict[str, Any]


class CapturedSteps:
    """The recorded steps of one stage. Used by one thread at a time."""

    def __init__(
        self,
        provider: Provider,
        graph_of: Callable[[int], bytes],
        values: Mapping[str, ort.OrtValue],
        pools: Mapping[str, ort.OrtValue],
        *,
        eager: Callable[[Sequence[Segment], Given], Arrays],
        known: Callable[[int], Given],
        model: ModelConfig,
        flavour: Flavour,
        first_spare_page: int,
        tolerance: float,
    ) -> None:
        """`graph_of` returns the graph for tables of a given width. `values` (weights, rotary tables) and `pools` are
        on the device, by name; the graph writes the pools in place. SPARE_PAGES pages of the pools from
        `first_spare_page` on belong to no run. `eager` runs a step without recording. `known` returns inputs for a
        known step of a given number of tokens. A recorded step may differ from `eager` by `tolerance` of a row's
        length."""
        self._provider, self._graph_of, self._flavour = provider, graph_of, flavour
        self._held, self._pools = {**values, **pools}, pools
        self._eager, self._known, self._tolerance = eager, known, tolerance
        self._spare = tuple(range(first_spare_page, first_spare_page + SPARE_PAGES))
        self._positions, self._max_pages = model.max_position, pages_for(model.max_position)
        copied = PAGE * model.heads * model.head_dim * np.dtype(flavour.dtype).itemsize
        self._max_cells = max(1, MAX_COPIED_BYTES // copied) if flavour == PLAIN else 1 << 20
        self._sessions: dict[bytes, Any] = {}
        self._graphs: OrderedDict[Bucket, _Graph] = OrderedDict()
        self._made = 0
        #: Why no step is recorded any more; empty while steps are.
        self.off = ""
        #: Steps that were replayed, and how often recording was given up.
        self.repeated = self.failures = 0

    @property
    def graphs(self) -> int:
        """How many recorded steps there are."""
        return len(self._graphs)

    def step(
        self, segments: Sequence[Segment], given: Given, stays: Mapping[str, Place] | None = None
    ) -> Arrays | None:
        """Replays a step and returns what `eager` would; None if `eager` has to run it. `given`: the inputs that do not
        follow from the segments: a row for each segment, or the wanted rows (`take`). Outputs named in `stays` are left
        on the device until the next step, and have as many rows as the bucket has sequences."""
        bucket = None if self.off else bucket_for(segments, max_cells=self._max_cells)
        graph = None if bucket is None else self._graph(bucket)
        if bucket is None or graph is None:
            return None
        try:
            outputs = self._run(graph, bucket, segments, given, stays)
        except Exception as error:  # noqa: BLE001 ONNX Runtime's own exception types have no public common base
            self._give_up(f"a recorded step of {bucket} could not be replayed: {error}")
            return None
        self.repeated += 1
        return outputs

    def warm(self) -> None:
        """Records steps of all buckets, until MAX_GRAPHS are recorded or RECORDING_S seconds are over."""
        until = time.monotonic() + RECORDING_S
        for bucket in all_buckets(max_pages=self._max_pages, max_cells=self._max_cells)[:MAX_GRAPHS]:
            if not self.off and time.monotonic() < until:
                self._graph(bucket)

    def close(self) -> None:
        """Drops all recorded steps, which are recorded again when needed, unless `off` says that none is."""
        for graph in self._graphs.values():
            self._release(graph)
        self._graphs.clear()
        self._sessions.clear()

    def _graph(self, bucket: Bucket) -> _Graph | None:
        """Returns the recorded step of the bucket, recorded first if there is none; None if that fails."""
        if bucket not in self._graphs:
            if len(self._graphs) >= MAX_GRAPHS:
                self._release(self._graphs.popitem(last=False)[1])
            try:
                self._record(bucket)
            except Exception as error:  # noqa: BLE001 ONNX Runtime's own exception types have no public common base
                self._give_up(f"a step of {bucket} could not be recorded: {error}")
                return None
        if bucket in self._graphs:
            self._graphs.move_to_end(bucket)
        return self._graphs.get(bucket)

    def _record(self, bucket: Bucket) -> None:
        """Records a step, replays it, and compares both with `eager`. Gives up if they differ."""
        rows = self._known(bucket.sequences + _CHECKS)
        for turn in range(_CHECKS):
            segments = _known_step(bucket, turn, self._spare, last=self._positions - 1)
            given = {name: array[turn : turn + bucket.sequences] for name, array in rows.items() if name != "take"}
            if "take" in rows:
                given["take"] = np.arange(bucket.sequences)
            if bucket not in self._graphs:
                self._graphs[bucket] = self._new(bucket, self._arrays(bucket, segments, given))
            actual, expected = self._run(self._graphs[bucket], bucket, segments, given), self._eager(segments, given)
            error = worst(row_error(actual[name], right) for name, right in expected.items() if right.ndim == 2)
            if not error <= self._tolerance:  # NaN is an error too
                self._give_up(
                    f"a recorded step of {bucket} is off by {error:.2g} of a row's length, where {self._tolerance:.2g} "
                    "is allowed"
                )
                return

    def _new(self, bucket: Bucket, arrays: Mapping[str, NDArray[Any]]) -> _Graph:
        """Returns a bucket's step with its memory on the device; its first run records it."""
        model = self._graph_of(bucket.pages)
        if model not in self._sessions:
            self._sessions[model] = self._provider.session(model, capture=True)
        session = self._sessions[model]
        binding, inputs = session.io_binding(), dict[str, Any]()
        for one in session.get_inputs():
            if one.name not in self._held:
                inputs[one.name] = self._provider.upload(session, arrays[one.name])
            held = self._held if one.name in self._held else inputs
            binding.bind_ortvalue_input(one.name, held[one.name])
        outputs: dict[str, Any] = {}
        for one in session.get_outputs():
            pool = self._pools.get(one.name.removesuffix("_out"))
            if pool is None:
                shape = [size if isinstance(size, int) else bucket.sequences for size in one.shape]
                outputs[one.name] = self._provider.empty(session, shape, np.float32)
            binding.bind_ortvalue_output(one.name, outputs[one.name] if pool is None else pool)
        self._made += 1
        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(self._made))
        kept = {name: np.ascontiguousarray(arrays[name]) for name in inputs}
        return _Graph(self._made, session, binding, options, inputs, kept, outputs)

    def _run(
        self,
        graph: _Graph,
        bucket: Bucket,
        segments: Sequence[Segment],
        given: Given,
        stays: Mapping[str, Place] | None = None,
    ) -> Arrays:
        """Runs the step: records it the first time, replays it later. Returns outputs of the given rows, copied to the
        host unless they stay."""
        arrays = self._arrays(bucket, segments, given)
        for name, value in graph.inputs.items():
            if not np.array_equal(graph.arrays[name], arrays[name]):
                graph.arrays[name] = np.ascontiguousarray(arrays[name])
                value.update_inplace(graph.arrays[name])
        graph.session.run_with_iobinding(graph.binding, graph.options)
        taken = len(given["take"]) if "take" in given else 0
        counts = {"hidden_out": len(segments), "sums": len(segments)}
        # Copies: if the device is the host, the next step writes to this memory.
        return {
            name: value if name in (stays or {}) else value.numpy()[: counts.get(name, taken)].copy()
            for name, value in graph.outputs.items()
        }

    def _arrays(self, bucket: Bucket, segments: Sequence[Segment], given: Given) -> dict[str, NDArray[Any]]:
        """Returns all inputs by name, in the bucket's shapes."""
        segments = filled(segments, bucket, spare_page=self._spare[0])
        inputs = batch_inputs(segments, self._flavour, least_pages=bucket.pages)
        for name, array in given.items():
            inputs[name] = np.zeros((bucket.sequences, *array.shape[1:]), array.dtype)
            inputs[name][: len(array)] = array
        return inputs

    def _give_up(self, reason: str) -> None:
        """Drops all recorded steps and records none any more."""
        log().warning("CAPTURE_OFF", device=self._provider.device, reason=reason)
        self.off = reason
        self.failures += 1
        self.close()

    def _release(self, graph: _Graph) -> None:
        graph.session.release_captured_graph(graph.number)


def _known_step(bucket: Bucket, turn: int, pages: tuple[int, ...], *, last: int) -> list[Segment]:
    """Returns a step of as many tokens as the bucket has sequences, each at a place of its own on `pages`. The first
    has as much context as the table holds: the same few pages again and again."""
    whole = pages * -(-bucket.pages // len(pages))
    others = (divmod(number + turn, len(pages)) for number in range(bucket.sequences - 1))
    return [
        Segment(rows=1, first_position=min(bucket.pages * PAGE - 1, last) - turn, pages=whole),
        *(Segment(rows=1, first_position=position, pages=(pages[at],)) for position, at in others),
    ]

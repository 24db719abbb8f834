"""Runs one stage, consecutive blocks of a model, on the device of an execution provider."""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import BlockFolderError, ExecutionError
from blockrelay.protocol.capabilities import Capabilities
from blockrelay_worker.execution.batch import Batch, StageOutput
from blockrelay_worker.execution.cpu.slot_mapping import check_segments
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.execution.executor import PageContent
from blockrelay_worker.execution.onnx.batches import plain_inputs
from blockrelay_worker.execution.onnx.failures import judged
from blockrelay_worker.execution.onnx.graphs import FloatType, export_graph, import_graph, stage_graph
from blockrelay_worker.execution.onnx.providers import Provider
from blockrelay_worker.execution.onnx.weights import block_weights
from blockrelay_worker.execution.page_pool import PagePool
from blockrelay_worker.kernels.specification import PAGE

#: Rows of a batch, and requests: as far as is tested.
MAX_ROWS = 1 << 12


class OnnxStage:
    """Blocks `first_block..last_block` (numbered from 1, both included) of one block folder on one device.

    Not exact: bits depend on the batch, the device and its driver. One thread uses it.
    """

    def __init__(
        self,
        folder: BlockFolder,
        first_block: int,
        last_block: int,
        *,
        pages: int,
        provider: Provider,
        numerics_id: str,
        dtype: FloatType = "float32",
    ) -> None:
        """Raises BlockFolderError for blocks that the folder does not have."""
        model = folder.model
        if not 1 <= first_block <= last_block <= model.blocks:
            raise BlockFolderError(f"there are no blocks {first_block} to {last_block}: the model has {model.blocks}")
        self.folder, self.first_block, self.last_block = folder, first_block, last_block
        self.layout = StageExecutor.layout_of(folder, first_block, last_block)
        self.pool = PagePool(self.layout, pages)
        self.details: Mapping[str, str] = {"provider": provider.ort_name, "dtype": dtype}
        self.capabilities = Capabilities(
            exact=False,
            ragged=True,
            max_rows=MAX_ROWS,
            max_sequences=MAX_ROWS,
            precision=folder.manifest.precision,
            numerics_id=numerics_id,
            kv_tokens=pages * PAGE,
        )
        self._provider, self._dtype = provider, dtype
        session = provider.session(stage_graph(model, first_block, last_block, dtype=dtype))
        self._session, self._binding = session, session.io_binding()
        self._held: dict[str, Any] = {}
        for block in range(first_block, last_block + 1):
            for name, array in block_weights(folder, block, dtype).items():
                self._held[f"block_{block}/{name}"] = provider.upload(session, array)
        layers = range(first_block, min(last_block, model.layers) + 1)
        if layers:
            for name, table in zip(("cos", "sin"), folder.rotary(), strict=True):
                self._held[name] = provider.upload(session, table.astype(dtype))
        self._pools = {
            f"block_{block}/{name}": provider.empty(session, (pages * PAGE, model.kv_heads, model.head_dim), dtype)
            for block in layers
            for name in ("keys", "values")
        }
        self._page_sessions: dict[str, tuple[Any, Any]] = {}
        self._lock = threading.Lock()
        for name, value in self._held.items():
            self._binding.bind_ortvalue_input(name, value)
        for name, value in self._pools.items():
            self._binding.bind_ortvalue_input(name, value)

    @property
    def takes_tokens(self) -> bool:
        """It has block 1."""
        return self.first_block == 1

    @property
    def gives_logits(self) -> bool:
        """It has the last block."""
        return self.last_block == self.folder.model.blocks

    def export_pages(self, pages: Sequence[int]) -> list[PageContent]:
        """Copies, of the layout's type."""
        if not pages:
            return []
        if not self._pools:
            return [[] for _ in pages]
        session, binding = self._page_session("export")
        binding.bind_cpu_input("pages", np.asarray(pages, np.int64))
        for name in self._pools:
            binding.bind_output(f"{name}_page", "cpu")
        with self._lock:
            session.run_with_iobinding(binding)
        found = [value.numpy() for value in binding.get_outputs()]
        return [
            [(keys[at], values[at]) for keys, values in zip(found[::2], found[1::2], strict=True)]
            for at in range(len(pages))
        ]

    def import_pages(self, pages: Sequence[int], contents: Sequence[PageContent]) -> None:
        if not pages or not self._pools:
            return
        session, binding = self._page_session("import")
        slots = np.asarray(pages, np.int64)[:, None] * PAGE + np.arange(PAGE)
        binding.bind_cpu_input("slots", slots.reshape(-1, 1))
        for index, (name, value) in enumerate(self._pools.items()):
            layer, half = divmod(index, 2)
            binding.bind_cpu_input(f"{name}_page", np.stack([content[layer][half] for content in contents]))
            binding.bind_ortvalue_output(f"{name}_out", value)
        with self._lock:
            session.run_with_iobinding(binding)

    def _page_session(self, way: Literal["export", "import"]) -> tuple[Any, Any]:
        """A session that moves pages, and a binding with the pools."""
        if way not in self._page_sessions:
            make = export_graph if way == "export" else import_graph
            layers = range(self.first_block, self.first_block + self.layout.layers)
            page: FloatType = "float16" if self.layout.dtype is np.float16 else "float32"
            graph = make(self.folder.model, layers, dtype=self._dtype, page=page)
            session = self._provider.session(graph)
            binding = session.io_binding()
            for name, value in self._pools.items():
                binding.bind_ortvalue_input(name, value)
            self._page_sessions[way] = session, binding
        return self._page_sessions[way]

    def close(self) -> None:
        """Drop sessions and memory of the device. The executor is useless afterwards."""
        self._page_sessions.clear()
        self._held.clear()
        self._pools.clear()
        del self._binding, self._session

    def run(self, batch: Batch) -> StageOutput:
        """See `Executor.run`."""
        started = time.perf_counter()
        check_segments(
            batch.segments, limit=self.folder.model.max_position, pages=self.pool.pages if self._pools else 0
        )
        inputs: dict[str, NDArray[Any]] = plain_inputs(batch.segments) if self._pools else {}
        if self.takes_tokens:
            assert batch.tokens is not None
            inputs["tokens"] = batch.tokens
        else:
            assert batch.hidden is not None
            inputs["hidden"] = batch.hidden
        if self.gives_logits:
            inputs["take"] = np.asarray(batch.wanted, np.int64)
            if not inputs["take"].size:  # nobody asks; the keys and values count
                inputs["take"] = np.zeros(1, np.int64)
        binding = self._binding
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        for name, value in self._pools.items():
            binding.bind_ortvalue_output(f"{name}_out", value)
        output = "logits" if self.gives_logits else "hidden_out"
        binding.bind_output(output, "cpu")
        try:
            with self._lock:
                self._session.run_with_iobinding(binding)
            result = binding.get_outputs()[-1].numpy()
        except Exception as error:  # ONNX Runtime's own exception types have no public common base
            block = judged(str(error)).block or f"block_{self.first_block}"
            raise ExecutionError(f"{block} failed: {error}", block=block) from error
        finally:
            binding.clear_binding_outputs()
        seconds = time.perf_counter() - started
        share = seconds / (self.last_block - self.first_block + 1)
        return StageOutput(
            hidden=None if self.gives_logits else result,
            logits=result[: len(batch.wanted)] if self.gives_logits else None,
            not_finite=_not_finite(result, batch, wanted=self.gives_logits),
            seconds={f"block_{block}": share for block in range(self.first_block, self.last_block + 1)},
        )


def _not_finite(rows: NDArray[np.float32], batch: Batch, *, wanted: bool) -> tuple[int, ...]:
    """Indexes of the segments with a row that is not finite, of these: the batch's, or the `wanted` ones."""
    bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if not bad.size:
        return ()
    if wanted:
        bad = np.asarray(batch.wanted)[bad[bad < len(batch.wanted)]]
    ends = np.cumsum([segment.rows for segment in batch.segments])
    return tuple(sorted({int(np.searchsorted(ends, row, side="right")) for row in bad}))

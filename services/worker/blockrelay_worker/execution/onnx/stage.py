"""Runs one stage, consecutive blocks of a model, on the device of an execution provider."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import BlockFolderError, ExecutionError
from blockrelay.protocol.capabilities import Capabilities
from blockrelay_worker.execution.batch import Batch, StageOutput
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.execution.onnx.batches import plain_inputs
from blockrelay_worker.execution.onnx.graphs import FloatType, stage_graph
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

    def run(self, batch: Batch) -> StageOutput:
        """See `Executor.run`."""
        started = time.perf_counter()
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
            self._session.run_with_iobinding(binding)
            result = binding.get_outputs()[-1].numpy()
        except Exception as error:  # ONNX Runtime's own exception types have no public common base
            raise ExecutionError(
                f"block_{self.first_block} failed: {error}", block=f"block_{self.first_block}"
            ) from error
        finally:
            binding.clear_binding_outputs()
        seconds = time.perf_counter() - started
        share = seconds / (self.last_block - self.first_block + 1)
        return StageOutput(
            hidden=None if self.gives_logits else result,
            logits=result[: len(batch.wanted)] if self.gives_logits else None,
            seconds={f"block_{block}": share for block in range(self.first_block, self.last_block + 1)},
        )

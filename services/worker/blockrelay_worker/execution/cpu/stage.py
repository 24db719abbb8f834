"""Runs one stage, consecutive blocks of a model, on a CPU."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import BlockFolderError, BlockrelayError, ExecutionError
from blockrelay.protocol.capabilities import Capabilities
from blockrelay_worker.execution.batch import Batch, BlockFault, StageOutput, check_segments, hidden_of, tokens_of
from blockrelay_worker.execution.cpu.block_calls import BlockCalls, Step
from blockrelay_worker.execution.cpu.layers import Block, Layer, load_block
from blockrelay_worker.execution.cpu.linears import Backend, Computation
from blockrelay_worker.execution.cpu.page_memory import PageMemory
from blockrelay_worker.execution.cpu.slot_mapping import place
from blockrelay_worker.execution.cpu.workspace import Workspace
from blockrelay_worker.execution.executor import PageContent
from blockrelay_worker.execution.numerics_id import numerics_id
from blockrelay_worker.execution.page_layout import layout_of
from blockrelay_worker.execution.ranks.command import Command
from blockrelay_worker.execution.ranks.communicator import Alone
from blockrelay_worker.execution.ranks.group import RankGroup
from blockrelay_worker.execution.ranks.shares import whole
from blockrelay_worker.kernels.arguments import F32
from blockrelay_worker.kernels.interface import Kernels, Linear
from blockrelay_worker.kernels.specification import PAGE
from blockrelay_worker.policy import CPU_MAX_ROWS, RANK_MAX_ROWS

#: Rows for which buffers are made at first; they grow to the next power of two when a larger batch comes.
_FIRST_CAPACITY = 16


class StageExecutor:
    """Blocks `first_block..last_block` (numbered from 1, both included) of one block folder, here or in ranks.

    Making it verifies nothing: `loading.load_stage` makes a verified executor. `run` writes only the KV pages that the
    segments name. Implements `Executor`. Not thread-safe, except `export_pages` and `import_pages`; the pool is not
    thread-safe either.
    """

    def __init__(
        self,
        folder: BlockFolder,
        first_block: int,
        last_block: int,
        *,
        pages: int,
        threads: int,
        kernels: Kernels,
        backend: Backend = "u8s8",
        shared: Mapping[int, Block] = MappingProxyType({}),
        group: RankGroup | None = None,
    ) -> None:
        """Loads the blocks of `folder` (from `open_block_folder`) with `pages` KV pages; `threads` >= 1.

        Blocks in `shared`, by number, are taken as they are: other executors may use them at the same time. With a
        `group`, which was made for these blocks and pages, this process computes the share of rank 0; `close` ends it.
        `backend` is one that these kernels can serve (see `load_linear`). Raises BlockFolderError for blocks that the
        folder lacks or that cannot be loaded, ExecutionError if ONNX Runtime is needed and has no usable library, or if
        the kernels refuse the tensors; for a rank that fails, what `RankGroup` raises. `pages` is at least 1:
        ValueError otherwise.
        """
        model = folder.model
        if not 1 <= first_block <= last_block <= model.blocks:
            raise BlockFolderError(f"there are no blocks {first_block} to {last_block}: the model has {model.blocks}")
        self.folder = folder
        self.first_block, self.last_block = first_block, last_block
        self.takes_tokens, self.gives_logits = first_block == 1, last_block == model.blocks
        self.layout = layout_of(folder, first_block, last_block)
        self._group = group
        if group is None:
            cut, communicator, most_rows = whole(model), Alone(kernels), CPU_MAX_ROWS
            self.memory = PageMemory(self.layout, pages)
            self._space = Workspace(model, _FIRST_CAPACITY)
        else:
            cut, communicator, most_rows = group.cut, group.communicator, RANK_MAX_ROWS
            self.memory = group.pages
            self._space = Workspace(model, most_rows, group.memory.file.take)
            group.start()
        self.pool = self.memory.pool
        self.backend: Backend = backend
        self.details = {"kernels": kernels.isa, "products": backend, "ranks": str(len(cut.shares))}
        self.capabilities = Capabilities(
            exact=folder.manifest.exact,
            ragged=True,
            max_rows=most_rows,
            max_sequences=most_rows,
            precision=folder.manifest.precision,
            numerics_id=numerics_id(folder.manifest),
            kv_tokens=pages * PAGE,
        )
        self._layers = self.layout.layers
        self._cos, self._sin = folder.rotary()
        by = Computation(kernels=kernels, backend=backend, threads=threads, cut=cut, ranks=communicator)
        self.blocks: dict[int, Block] = {
            index: shared.get(index) or load_block(folder, index, by) for index in range(first_block, last_block + 1)
        }
        if group is not None:
            group.wait_until_loaded()
        first = self.blocks[first_block]
        self._embedding = first.embedding if isinstance(first, Layer) else None
        self._logits = np.empty((0, model.vocab_size), np.float32)
        self._calls = BlockCalls(self.blocks, self.memory.k_pages, self.memory.v_pages, kernels)

    @property
    def group(self) -> RankGroup | None:
        """The other ranks of this stage; None if it is computed here alone."""
        return self._group

    @property
    def usable(self) -> bool:
        """False once a rank is gone."""
        return self._group is None or self._group.lost is None

    @property
    def linears(self) -> Iterator[Linear]:
        """The linear layers of all blocks: the columns of this process."""
        return self._calls.linears

    def linears_changed(self) -> None:
        """Drops recorded programs; to be called after a linear layer changed its backend."""
        self._calls.linears_changed()

    def export_pages(self, pages: Sequence[int]) -> list[PageContent]:
        return self.memory.export_pages(pages)

    def import_pages(self, pages: Sequence[int], contents: Sequence[PageContent]) -> None:
        self.memory.import_pages(pages, contents)

    def run(self, batch: Batch) -> StageOutput:
        """Runs all blocks of the stage (see `Executor.run`)."""
        return self._run(batch, self.first_block, self.last_block)

    def run_block(self, block: int, batch: Batch) -> StageOutput:
        """Runs one block of the stage alone: `batch` is its input, the result its output. For known answers.

        `block` must be in this stage.
        """
        assert self.first_block <= block <= self.last_block, f"block_{block} is not in this stage"
        return self._run(batch, block, block)

    def first_not_finite(self, batch: Batch) -> BlockFault | None:
        """Returns the first block whose output is not finite (see `Executor.first_not_finite`)."""
        block_input, seconds = batch, dict[str, float]()
        for block in range(self.first_block, self.last_block + 1):
            output = self.run_block(block, block_input)
            seconds |= output.seconds
            if output.not_finite:
                return BlockFault(block=f"block_{block}", seconds=seconds)
            if output.hidden is not None:
                block_input = replace(batch, tokens=None, hidden=output.hidden.copy())
        return None

    def _run(self, batch: Batch, first_block: int, last_block: int) -> StageOutput:
        began = time.perf_counter()
        count = check_segments(batch.segments, limit=self._cos.shape[0], pages=self.pool.pages if self._layers else 0)
        if count > self._space.capacity:
            self._grow(count)
        rows = place(batch.segments, self._space, self._cos, self._sin, keeps_pages=self._layers > 0)
        placed = time.perf_counter()
        x = self._read_in(batch, count, is_first=first_block == 1)
        there = time.perf_counter()
        embedded = there - placed if first_block == 1 else 0.0
        logits = self._logits_buffer(len(batch.wanted)) if last_block == self.folder.model.blocks else None
        seconds: list[float] = []
        try:
            if self._group is not None:
                command = Command(*rows.shape, wanted=len(batch.wanted), first=first_block, last=last_block)
                self._group.begin(command, x, batch.wanted)
            # Overflow is reported as a row that is not finite; a warning would only repeat it.
            with np.errstate(all="ignore"):
                step = Step(x, rows, batch.wanted, logits, self._space, first_block, last_block)
                self._calls.program(step).run(seconds)
            if self._group is not None:
                self._group.communicator.meet()
        except Exception as error:  # ONNX Runtime's own exception types have no public common base
            if self._group is not None:
                raise self._group.failed(error) from error
            block = f"block_{first_block + len(seconds)}"
            verb = "" if isinstance(error, BlockrelayError) else " failed"
            spent = [*seconds, time.perf_counter() - there - sum(seconds)]
            spent[0] += embedded
            raise ExecutionError(f"{block}{verb}: {error}", block=block, seconds=_named(first_block, spent)) from error
        seconds[0] += embedded
        return StageOutput(
            hidden=x if logits is None else None,
            logits=logits,
            not_finite=_not_finite(x, logits, batch),
            seconds=_named(first_block, seconds),
            kv_s=placed - began,
            moved_s=0.0 if first_block == 1 else there - placed,
        )

    def close(self) -> None:
        """Drops sessions, memory maps and buffers of steps, and ends other ranks. It cannot be used afterwards.

        KV pages and the buffer of logits go with the object itself. Weights are freed with the last executor that has
        their block.
        """
        if self._group is not None:
            self._group.close()
        self._calls.close()
        self.blocks.clear()
        self._embedding = None
        self._space = Workspace(self.folder.model, 1)

    def _read_in(self, batch: Batch, count: int, *, is_first: bool) -> F32:
        """Writes the batch's hidden states, or the embeddings of its tokens, float32 [count, H], to the workspace."""
        model = self.folder.model
        x = self._space.hidden(count, model.hidden_size)
        if is_first:
            assert self._embedding is not None
            x[...] = self._embedding[tokens_of(batch, count, model)]
        else:
            x[...] = hidden_of(batch, count, model)
        return x

    def _logits_buffer(self, wanted: int) -> F32:
        """Returns a buffer for the logits of `wanted` rows, float32 [wanted, vocab]."""
        if self._logits.shape[0] < wanted:
            self._calls.forget_buffers()
            self._logits = np.empty((1 << (wanted - 1).bit_length(), self._logits.shape[1]), np.float32)
        return self._logits[:wanted]

    def _grow(self, count: int) -> None:
        self._calls.forget_buffers()
        self._space = Workspace(self.folder.model, 1 << (count - 1).bit_length())


def _named(first_block: int, seconds: Sequence[float]) -> dict[str, float]:
    return {f"block_{first_block + index}": spent for index, spent in enumerate(seconds)}


def _not_finite(x: F32, logits: F32 | None, batch: Batch) -> tuple[int, ...]:
    """Returns the indexes of the segments with a row of x, or of wanted logits, that is not finite.

    The layer before the head does not compute rows of x that are not wanted. An overflow there affects only rows that
    read their keys and values, and these are reported.
    """
    bad_rows: set[int] = set()
    if not np.isfinite(x).all():
        bad_rows.update(np.flatnonzero(~np.isfinite(x).all(axis=1)).tolist())
    if logits is not None and not np.isfinite(logits).all():
        bad_rows.update(batch.wanted[int(index)] for index in np.flatnonzero(~np.isfinite(logits).all(axis=1)))
    return batch.segments_with(bad_rows) if bad_rows else ()

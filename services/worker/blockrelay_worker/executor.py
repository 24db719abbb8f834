"""Runs one stage, consecutive blocks of a model, on ragged batches (DESIGN section 3)."""

import time

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder import BlockFolder
from blockrelay.errors import BlockFolderError, BlockrelayError, ExecutionError
from blockrelay_worker.batch import Batch, StageOutput
from blockrelay_worker.blocks import Head, Layer, Rows
from blockrelay_worker.kernels.interface import Kernels
from blockrelay_worker.kernels.numerics import PAGE
from blockrelay_worker.linears import Variant
from blockrelay_worker.pages import PageLayout, PagePool, pages_for
from blockrelay_worker.workspace import Workspace

#: Rows for which buffers are made at first; they double as larger batches come.
_FIRST_CAPACITY = 16


class StageExecutor:
    """Blocks `first_block..last_block` (numbered from 1, both included) of one block folder, in this process.

    Loading computes nothing: `known_answers.load_stage` makes a verified executor. `run` writes the pages that the
    segments name and no other. Not thread-safe, nor is the pool.
    """

    def __init__(
        self,
        folder: BlockFolder,
        first_block: int,
        last_block: int,
        *,
        pool: PagePool,
        threads: int,
        kernels: Kernels,
        variant: Variant = "u8s8",
    ) -> None:
        """`folder` comes from `open_block_folder`; `pool` has the layout `layout_of(...)`; `threads` >= 1.

        Raises BlockFolderError for blocks that the folder does not have or that cannot be loaded.
        """
        model = folder.model
        if not 1 <= first_block <= last_block <= model.blocks:
            raise BlockFolderError(f"there are no blocks {first_block} to {last_block}: the model has {model.blocks}")
        assert pool.layout == self.layout_of(folder, first_block, last_block), "the pool is another stage's"
        self.folder = folder
        self.first_block, self.last_block = first_block, last_block
        self.pool = pool
        self.variant: Variant = variant
        self._cos, self._sin = folder.rotary()
        self._layers = [
            Layer(folder, index, variant=variant, threads=threads, kernels=kernels)
            for index in range(first_block, min(last_block, model.layers) + 1)
        ]
        self._head = (
            Head(folder, last_block, variant=variant, threads=threads, kernels=kernels)
            if last_block == model.blocks
            else None
        )
        self._embedding = self._layers[0].embedding if first_block == 1 else None
        self._space = Workspace(model, _FIRST_CAPACITY)
        self._logits = np.empty((0, model.vocab_size), np.float32)

    @staticmethod
    def layout_of(folder: BlockFolder, first_block: int, last_block: int) -> PageLayout:
        """The page layout that a pool for these blocks must have; a stage of the head alone has no layers."""
        model = folder.model
        return PageLayout(
            layers=min(last_block, model.layers) - first_block + 1,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            dtype=np.float16 if folder.manifest.quantised_rows else np.float32,
        )

    @property
    def takes_tokens(self) -> bool:
        """The stage holds block 1."""
        return self.first_block == 1

    @property
    def gives_logits(self) -> bool:
        """The stage holds the last block."""
        return self._head is not None

    def run(self, batch: Batch) -> StageOutput:
        """Run every block on the batch.

        Deterministic: a row's result depends on the tokens of its request up to that row and on nothing else, bit by
        bit in precisions marked exact. A row that is not finite is reported in the output, not raised. Raises
        ExecutionError (naming the block) when a block fails as a whole or the batch makes no sense; then the pages
        named by the batch hold rubbish from each segment's first position on, and the same batch may be run again.
        """
        return self._run(batch, self.first_block, self.last_block)

    def run_block(self, block: int, batch: Batch) -> StageOutput:
        """Run one block of the stage alone: `batch` is its input, the result its output. For known answers."""
        assert self.first_block <= block <= self.last_block, f"block_{block} is not in this stage"
        return self._run(batch, block, block)

    def _run(self, batch: Batch, first_block: int, last_block: int) -> StageOutput:
        rows = self._place(batch)
        count = rows.positions.size
        if count > self._space.capacity:
            self._grow(count)
        started = time.perf_counter()
        seconds: dict[str, float] = {}
        x = self._embed(batch, count) if first_block == 1 else self._copy_in(batch, count)
        wanted = np.asarray(batch.wanted, np.intp)
        gathered: NDArray[np.float32] | None = None
        logits = None
        block = first_block
        try:
            # Overflow in a row shows as a row that is not finite; a warning would only say it twice.
            with np.errstate(all="ignore"):
                for block in range(first_block, last_block + 1):
                    if (index := block - self.first_block) < len(self._layers):
                        layer, pages = self._layers[index], (self.pool.k_pages[index], self.pool.v_pages[index])
                        if wanted.size < count and self._head is not None and block + 1 == last_block:
                            gathered = layer.run_wanted(x, rows, self._space, *pages, wanted)
                        else:
                            layer.run(x, rows, self._space, *pages)
                    elif self._head is not None:
                        logits = self._run_head(self._head, x if gathered is None else gathered, wanted)
                    ended = time.perf_counter()
                    seconds[f"block_{block}"] = ended - started
                    started = ended
        except BlockrelayError as error:
            raise ExecutionError(f"block_{block}: {error}", block=f"block_{block}") from error
        except Exception as error:  # ONNX Runtime's own exception types have no public common base
            raise ExecutionError(f"block_{block} failed: {error}", block=f"block_{block}") from error
        return StageOutput(
            hidden=x if logits is None else None,
            logits=logits,
            not_finite=_not_finite(x, logits, batch),
            seconds=seconds,
        )

    def close(self) -> None:
        """Drop sessions, buffers and memory maps. The executor is useless afterwards."""
        self._layers.clear()
        self._head = None
        self._embedding = None
        self._space = Workspace(self.folder.model, 1)

    def _place(self, batch: Batch) -> Rows:
        """Positions and pages of the rows. Raises ExecutionError for a segment that is out of range."""
        limit, pages_in_pool = self._cos.shape[0], self.pool.pages
        used: list[list[int]] = []
        first_row = 0
        segments = np.empty((len(batch.segments), 3), np.int64)
        for index, segment in enumerate(batch.segments):
            end = segment.first_position + segment.rows
            if segment.rows < 1 or segment.first_position < 0 or end > limit:
                raise ExecutionError(f"segment {index}: positions {segment.first_position}..{end - 1} of {limit}")
            # A stage of the head alone keeps nothing: page 0 of no layer stands for all of them.
            needed = list(segment.pages[: pages_for(end)]) if self._layers else [0] * pages_for(end)
            if len(needed) * PAGE < end:
                raise ExecutionError(f"segment {index}: {len(needed)} pages do not reach position {end - 1}")
            if min(needed) < 0 or max(needed) >= pages_in_pool:
                raise ExecutionError(f"segment {index}: a page id is not in 0..{pages_in_pool - 1}")
            used.append(needed)
            segments[index] = (first_row, segment.rows, segment.first_position)
            first_row += segment.rows
        if not first_row:
            raise ExecutionError("an empty batch")
        table = np.zeros((len(used), max(map(len, used))), np.int32)
        for line, needed in zip(table, used, strict=True):
            line[: len(needed)] = needed
        owner = np.repeat(np.arange(len(used)), segments[:, 1])
        positions = (np.arange(first_row) - segments[owner, 0] + segments[owner, 2]).astype(np.int32)
        return Rows(
            positions=positions,
            page=table[owner, positions // PAGE],
            slot=positions % PAGE,
            page_table=table,
            segments=segments,
            owner=owner,
            cos=self._cos,
            sin=self._sin,
        )

    def _embed(self, batch: Batch, count: int) -> NDArray[np.float32]:
        """The residual stream of the batch's token ids, in the workspace."""
        assert self._embedding is not None
        vocabulary, width = self._embedding.shape
        tokens = batch.tokens
        if tokens is None or tokens.shape != (count,):
            raise ExecutionError(f"this stage takes {count} token ids, one per row of the segments")
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
            raise ExecutionError(f"a token id is not in 0..{vocabulary - 1}")
        x = self._space.hidden(count, width)
        x[...] = self._embedding[tokens]
        return x

    def _copy_in(self, batch: Batch, count: int) -> NDArray[np.float32]:
        """The batch's rows, in the workspace."""
        width = self.folder.model.hidden_size
        hidden = batch.hidden
        if hidden is None or hidden.shape != (count, width) or hidden.dtype != np.float32:
            raise ExecutionError(f"this stage takes float32 rows [{count}, {width}]")
        x = self._space.hidden(count, width)
        x[...] = hidden
        return x

    def _run_head(self, head: Head, x: NDArray[np.float32], wanted: NDArray[np.intp]) -> NDArray[np.float32]:
        """Logits of the rows `wanted`; x has either all rows or just these."""
        if self._logits.shape[0] < wanted.size:
            for linear in head.linears.values():
                linear.forget_buffers()
            self._logits = np.empty((1 << (wanted.size - 1).bit_length(), self._logits.shape[1]), np.float32)
        logits = self._logits[: wanted.size]
        if wanted.size:
            if x.shape[0] != wanted.size:
                x = np.take(x, wanted, axis=0, out=self._space.wanted(wanted.size, x.shape[1]))
            head.run(x, self._space, logits)
        return logits

    def _grow(self, count: int) -> None:
        for part in (*self._layers, *([self._head] if self._head is not None else [])):
            for linear in part.linears.values():
                linear.forget_buffers()
        self._space = Workspace(self.folder.model, 1 << (count - 1).bit_length())


def _not_finite(x: NDArray[np.float32], logits: NDArray[np.float32] | None, batch: Batch) -> tuple[int, ...]:
    """Indexes of the segments with a row x, or wanted logits, that are not finite.

    Of rows that are not wanted, the layer before the head leaves x as it was: what overflows there meets nobody but
    the rows that read its keys and values, and these report it.
    """
    bad_rows: set[int] = set()
    if not np.isfinite(x).all():
        bad_rows.update(np.flatnonzero(~np.isfinite(x).all(axis=1)).tolist())
    if logits is not None and not np.isfinite(logits).all():
        bad_rows.update(batch.wanted[int(index)] for index in np.flatnonzero(~np.isfinite(logits).all(axis=1)))
    if not bad_rows:
        return ()
    ends = np.cumsum([segment.rows for segment in batch.segments])
    return tuple(sorted({int(np.searchsorted(ends, row, side="right")) for row in bad_rows}))

"""Runs all ONNX blocks that others made, one behind the other, as one stage on the device of an execution provider."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import BlockFolderError, BlockrelayError, ExecutionError
from blockrelay.onnx_blocks.served_shape import request_inputs, served_shape, served_wiring
from blockrelay.onnx_blocks.wiring import FromBlock, Wiring
from blockrelay.protocol.capabilities import Capabilities
from blockrelay_worker.execution.batch import Batch, BlockFault, StageOutput, check_segments, tokens_of
from blockrelay_worker.execution.executor import PageContent
from blockrelay_worker.execution.onnx.as_is.block import AsIsBlock, Value, on_host
from blockrelay_worker.execution.onnx.as_is.finite import not_finite
from blockrelay_worker.execution.onnx.as_is.groups import Group, grouped, waves
from blockrelay_worker.execution.onnx.as_is.paged_graph import TAKEN
from blockrelay_worker.execution.onnx.as_is.warm_blocks import ALL, WarmBlocks, WarmLimits
from blockrelay_worker.execution.onnx.bound.pages import DevicePages
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider, Provider, Steps
from blockrelay_worker.execution.onnx.tries import TRIES, TryLimits, reason_of
from blockrelay_worker.execution.page_layout import layout_of
from blockrelay_worker.execution.page_pool import PagePool
from blockrelay_worker.kernels.specification import PAGE

#: Rows of a batch, and requests: as of OnnxStage.
MAX_ROWS = 1 << 12


class AsIsStage:
    """All blocks of a model of ONNX blocks.

    Not exact: bits depend on the batch, the device, its driver and ONNX Runtime. One thread uses it. Rows that nobody
    wants logits of are not looked at, whether they are finite: what is not shows in those behind them.
    """

    takes_tokens = gives_logits = usable = True

    def __init__(
        self,
        folder: BlockFolder,
        *,
        pages: int,
        provider: Provider,
        numerics_id: str,
        block_bytes: Sequence[int],
        warm: WarmLimits = ALL,
        ran_block: Callable[[], None] = lambda: None,
        tries: TryLimits = TRIES,
    ) -> None:
        """`block_bytes` are what each block takes on the device, where as many are at once as `warm` allows;
        `ran_block` is called behind each that has run, and `tries` are those of each. Raises BlockFolderError for
        blocks that cannot be loaded, ExecutionError for what this device cannot load now."""
        self.folder, self._provider, self._ran_block = folder, provider, ran_block
        self._steps: Steps = "many" if warm.all_of(block_bytes) else "one"
        self.wiring = served_wiring(folder.root)
        self.shape = served_shape(self.wiring)
        self._request = request_inputs(self.wiring)
        self.layout = layout_of(folder, 1, folder.model.blocks)
        self.pool = PagePool(self.layout, pages)
        self.details: Mapping[str, str] = {"provider": provider.ort_name, "blocks": "as they are"}
        self.capabilities = Capabilities(
            exact=False,
            ragged=True,
            max_rows=MAX_ROWS,
            max_sequences=MAX_ROWS,
            precision=folder.manifest.precision,
            numerics_id=numerics_id,
            kv_tokens=pages * PAGE,
        )
        model = folder.model
        self.blocks = WarmBlocks(self._opened, block_bytes, limits=warm, beside=provider.loads_beside, tries=tries)
        first = min(present.index for present in self.wiring.presents.values())
        for index in range(1, model.blocks + 1 if self._steps == "many" else first + 1):
            self._load(index)
        self.pages = DevicePages(
            provider,
            self.blocks.get(first).session,
            model,
            range(1, model.layers + 1),
            self.layout,
            pages=pages,
            dtype=self.shape.dtype,
        )
        self._last_use = last_uses(self.wiring)
        self.one_by_one = self.blocks.get(first).one_by_one

    def _opened(self, index: int) -> AsIsBlock:
        root = self.folder.onnx_root
        assert root is not None, "a model of ONNX blocks"
        try:
            return AsIsBlock(self._provider, root, self.wiring, self.shape, index, steps=self._steps)
        except BlockrelayError:
            raise
        except Exception as error:  # ONNX Runtime's own exception types have no public common base
            signature = self.wiring.blocks[index - 1]
            said = f"{root / signature.file}: cannot be loaded on {self._provider.device}: {error}"
            if reason_of(error):
                raise ExecutionError(said, block=signature.block) from error
            raise BlockFolderError(said) from error

    def _load(self, index: int) -> None:
        try:
            self.blocks.get(index)
        except ExecutionError as error:
            if self._provider.name == CpuProvider.name and reason_of(error) == "unknown":
                raise BlockFolderError(str(error)) from error  # what CPUs cannot load is no block
            raise

    @property
    def weight_bytes(self) -> int:
        """Of the blocks that are warm."""
        return self.blocks.bytes

    @property
    def pool_bytes(self) -> int:
        """Of all KV pages there are."""
        return self.pages.bytes

    def moved_bytes(self) -> tuple[int, int]:
        """What went up to the device and came down from it since this was last asked; weights are not counted."""
        return self.pages.moved_bytes()

    def export_pages(self, pages: Sequence[int]) -> list[PageContent]:
        """Copies, of the layout's type."""
        return self.pages.export_pages(pages)

    def import_pages(self, pages: Sequence[int], contents: Sequence[PageContent]) -> None:
        """See `PageOwner.import_pages`."""
        self.pages.import_pages(pages, contents)

    def clean_up(self) -> None:
        """Give back what is kept for later."""
        self.pages.clean_up()
        self.blocks.clean_up()

    def close(self) -> None:
        """Drop sessions and pages."""
        self.blocks.close()
        self.pages.close()

    def run(self, batch: Batch) -> StageOutput:
        """See `Executor.run`."""
        model, kv_s = self.folder.model, 0.0
        count = check_segments(batch.segments, limit=model.max_position, pages=self.pool.pages)
        tokens = tokens_of(batch, count, model)
        logits = np.empty((len(batch.wanted), self.shape.vocabulary), np.float32)
        seconds = dict.fromkeys((block.block for block in self.wiring.blocks), 0.0)
        for wave in waves(batch.segments, one_by_one=self.one_by_one):
            began = time.perf_counter()
            groups = grouped(wave, tokens, batch.wanted, self._request, single=self.shape.single)
            kv_s += time.perf_counter() - began
            for group, rows in zip(groups, self._run(groups, seconds), strict=True):
                if group.wanted:
                    logits[list(group.wanted)] = rows
        bad = ~np.isfinite(logits).all(axis=1)
        ends = np.cumsum([segment.rows for segment in batch.segments])
        rows = np.asarray(batch.wanted, np.intp)[bad]
        return StageOutput(
            logits=logits,
            not_finite=tuple(sorted({int(np.searchsorted(ends, row, side="right")) for row in rows})),
            seconds=seconds,
            kv_s=kv_s,
        )

    def first_not_finite(self, batch: Batch) -> BlockFault | None:
        """See `Executor.first_not_finite`. All outputs of a block are looked at, but for its KV."""
        count = check_segments(batch.segments, limit=self.folder.model.max_position, pages=self.pool.pages)
        tokens, seconds = tokens_of(batch, count, self.folder.model), dict[str, float]()
        for wave in waves(batch.segments, one_by_one=self.one_by_one):
            groups = grouped(wave, tokens, batch.wanted, self._request, single=self.shape.single)
            values: list[dict[str, Value]] = [dict(group.inputs) for group in groups]
            for index, block in enumerate(self.wiring.blocks, 1):
                self._run_block(index, values, seconds)
                for have, group in zip(values, groups, strict=True):
                    names = [tensor.name for tensor in block.outputs if tensor.name in have]
                    names += [TAKEN] if TAKEN in have and group.wanted else []
                    if any(not_finite(on_host(have[name])) for name in names):
                        return BlockFault(block=block.block, seconds=self._up_to(index, seconds))
                self._forget(index, values)
        return None

    def _run(self, groups: Sequence[Group], seconds: dict[str, float]) -> list[NDArray[Any]]:
        """The logits that each group wants; what blocks take is added to `seconds`."""
        values: list[dict[str, Value]] = [dict(group.inputs) for group in groups]
        for index in range(1, self.folder.model.blocks + 1):
            self._run_block(index, values, seconds)
            self._forget(index, values)
        taken = [on_host(have[TAKEN]) for have in values]
        self.pages.up += sum(one.nbytes for group in groups for one in group.inputs.values())
        self.pages.down += sum(rows.nbytes for rows in taken)
        return taken

    def _run_block(self, index: int, values: Sequence[dict[str, Value]], seconds: dict[str, float]) -> None:
        """Block `index` on what each group has, to which its outputs are added, as what it took is to `seconds`."""
        name, began = self.wiring.blocks[index - 1].block, time.perf_counter()
        try:
            taken_s = self.blocks.work(index, lambda block: self._put(block, values))
        except Exception as error:  # noqa: BLE001 ONNX Runtime's own exception types have no public common base
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began
            said = str(error) if isinstance(error, ExecutionError) else f"{name} failed: {error}"
            raise ExecutionError(said, block=name, seconds=self._up_to(index, seconds)) from (error.__cause__ or error)
        seconds[name] = seconds.get(name, 0.0) + taken_s
        self._ran_block()

    def _put(self, block: AsIsBlock, values: Sequence[dict[str, Value]]) -> None:
        """Add the outputs of `block` to what each group has: all of them, or none where it fails."""
        outputs = [block.run(have, self.pages.pools) for have in values]
        for have, found in zip(values, outputs, strict=True):
            have |= found

    def _forget(self, index: int, values: Sequence[dict[str, Value]]) -> None:
        """Drop what no block behind `index` takes."""
        for name in self._last_use.get(index, ()):
            for have in values:
                have.pop(name, None)

    def _up_to(self, index: int, seconds: Mapping[str, float]) -> dict[str, float]:
        """Of the blocks up to `index`: those behind it may have run with rows before these."""
        return {block.block: seconds[block.block] for block in self.wiring.blocks[:index]}


def last_uses(wiring: Wiring) -> dict[int, list[str]]:
    """By block, the outputs of earlier blocks that no later one takes."""
    last: dict[str, int] = {}
    for block, sources in zip(wiring.blocks, wiring.sources, strict=True):
        for name, source in sources.items():
            if isinstance(source, FromBlock):
                last[name] = block.index
    found: dict[int, list[str]] = {}
    for name, index in last.items():
        found.setdefault(index, []).append(name)
    return found

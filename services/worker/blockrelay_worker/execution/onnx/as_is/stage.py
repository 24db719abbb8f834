"""One stage of ONNX blocks that others made: they run one after the other on the device of an execution provider."""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import BlockFolderError, ExecutionError
from blockrelay.onnx_blocks.handed_on import handed_on, max_rows
from blockrelay.onnx_blocks.served_shape import logits_of
from blockrelay.onnx_blocks.wiring import FromBlock, Wiring
from blockrelay.protocol.capabilities import Capabilities
from blockrelay.protocol.plan import Stage
from blockrelay_worker.execution.batch import Batch, BlockFault, NamedTensors, StageOutput, check_segments, tokens_of
from blockrelay_worker.execution.executor import PageContent
from blockrelay_worker.execution.onnx.as_is.block import AsIsBlock, Value, on_host
from blockrelay_worker.execution.onnx.as_is.finite import not_finite
from blockrelay_worker.execution.onnx.as_is.groups import Group, SegmentPart, grouped, handed_waves, waves
from blockrelay_worker.execution.onnx.as_is.handing_on import Arrays, cut, joined
from blockrelay_worker.execution.onnx.as_is.paged_graph import TAKEN
from blockrelay_worker.execution.onnx.as_is.served_blocks import ServedBlocks
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider
from blockrelay_worker.execution.onnx.tries import reason_of
from blockrelay_worker.execution.page_layout import layout_of
from blockrelay_worker.execution.page_pool import PagePool
from blockrelay_worker.kernels.specification import PAGE

#: Most tokens of a batch, and most requests.
MAX_ROWS = 1 << 12


class AsIsStage:
    """Blocks `first_block..last_block` of a model of ONNX blocks. Implements `Executor`.

    Not exact: bits depend on the batch, the device, its driver and ONNX Runtime. One thread uses it. In the block that
    makes logits, only rows with wanted logits are checked for NaN and infinities; the others show in later tokens,
    which attend to them. Outputs of blocks stay on the device until they leave the stage.
    """

    usable = True

    def __init__(
        self,
        served: ServedBlocks,
        first_block: int,
        last_block: int,
        *,
        pages: int,
        numerics_id: str,
        ran_block: Callable[[], None] = lambda: None,
    ) -> None:
        """`ran_block` is called after each block that has run. Raises BlockFolderError for blocks that cannot be loaded
        or cannot be a stage, ExecutionError for blocks that this device cannot load now. Raises OnnxBlocksError for a
        file of an earlier block that cannot be read. Raises ONNX Runtime's error if the reference fails on a CPU or the
        pages find no memory, and UsageError for a pool larger than the device has in one piece."""
        self.served, self.folder, self._ran_block = served, served.folder, ran_block
        self.first_block, self.last_block = first_block, last_block
        self.wiring, self.shape, model = served.wiring, served.shape, served.folder.model
        self.taken = handed_on(self.wiring, first_block - 1)
        self.handed_on = handed_on(self.wiring, last_block)
        self.takes_tokens = first_block == 1
        self.gives_logits = first_block <= logits_of(self.wiring)[0].index <= last_block
        self.single = self.shape.single or served.count_sequences((*self.taken, *self.handed_on))
        self.layout = layout_of(self.folder, first_block, last_block)
        self.pool = PagePool(self.layout, pages)
        self.details: Mapping[str, str] = {"provider": served.provider.ort_name, "blocks": "as they are"}
        self.capabilities = Capabilities(
            exact=False,
            ragged=True,
            max_rows=max_rows(self.wiring, Stage(first=first_block, last=last_block), model.max_position, MAX_ROWS),
            max_sequences=MAX_ROWS,
            precision=self.folder.manifest.precision,
            numerics_id=numerics_id,
            kv_tokens=pages * PAGE,
        )
        self.blocks = served.warm.part(first_block, last_block)
        try:
            for index in range(first_block, last_block + 1) if served.steps == "many" else (first_block,):
                self._load(index)
            self.pages = served.pages(served.provider, first_block, last_block, self.blocks.get(first_block), pages)
        except BaseException:
            self.blocks.close()
            raise
        self._last_use = last_uses(self.wiring)

    def _load(self, index: int) -> None:
        try:
            self.blocks.get(index)
        except ExecutionError as error:
            if self.served.provider.name == CpuProvider.name and reason_of(error) == "unknown":
                raise BlockFolderError(str(error)) from error  # if even a CPU cannot load it, the file is wrong
            raise

    @property
    def names(self) -> list[str]:
        """The names of its blocks."""
        return [block.block for block in self.wiring.blocks[self.first_block - 1 : self.last_block]]

    @property
    def weight_bytes(self) -> int:
        """Bytes of its blocks that are warm."""
        return self.blocks.bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of all its KV pages."""
        return self.pages.bytes

    def moved_bytes(self) -> tuple[int, int]:
        """Returns the bytes that went up to the device and came down since the last call, without weights."""
        return self.pages.moved_bytes()

    def export_pages(self, pages: Sequence[int]) -> list[PageContent]:
        """Returns copies of the pages, in the type of `layout`. Raises what ONNX Runtime raises."""
        return self.pages.export_pages(pages)

    def import_pages(self, pages: Sequence[int], contents: Sequence[PageContent]) -> None:
        """Writes pages: see `PageOwner.import_pages`. Raises what ONNX Runtime raises."""
        self.pages.import_pages(pages, contents)

    def clean_up(self) -> None:
        """Gives memory that is kept for later steps back to the device and the system."""
        self.pages.clean_up()
        self.blocks.clean_up()

    def close(self) -> None:
        """Drops the pages, and the sessions that no other stage has."""
        self.blocks.close()
        self.pages.close()

    def run(self, batch: Batch) -> StageOutput:
        """Runs a batch: see `Executor.run`. Raises ExecutionError, naming the block if one failed."""
        tokens, kv_s = self._tokens(batch), 0.0
        logits = np.empty((len(batch.wanted), self.shape.vocabulary), np.float32)
        made: list[list[NamedTensors]] = [[] for _ in batch.segments]
        seconds, bad = dict.fromkeys(self.names, 0.0), set[int]()
        for wave in self._waves(batch):
            began = time.perf_counter()
            groups = self._grouped(wave, tokens, batch)
            kv_s += time.perf_counter() - began
            for group, have in zip(groups, self._run(groups, seconds), strict=True):
                if self.gives_logits and group.wanted:
                    logits[list(group.wanted)] = on_host(have[TAKEN])
                if self.handed_on:
                    bad |= self._hand_on(group, have, made)
        if not self.gives_logits:
            return StageOutput(tensors=made, not_finite=tuple(sorted(bad)), seconds=seconds, kv_s=kv_s)
        rows = np.asarray(batch.wanted, np.intp)[~np.isfinite(logits).all(axis=1)]
        return StageOutput(
            logits=logits,
            not_finite=batch.segments_with(rows),
            seconds=seconds,
            kv_s=kv_s,
        )

    def first_not_finite(self, batch: Batch) -> BlockFault | None:
        """Finds the first block whose output is NaN or infinite: see `Executor.first_not_finite`. All outputs are
        checked, of logits the wanted rows, but not the KV. Masks may have minus infinity."""
        tokens, seconds = self._tokens(batch), dict[str, float]()
        for wave in self._waves(batch):
            groups = self._grouped(wave, tokens, batch)
            values: list[dict[str, Value]] = [dict(group.inputs) for group in groups]
            for index in range(self.first_block, self.last_block + 1):
                block = self.wiring.blocks[index - 1]
                self._run_block(index, values, seconds)
                for have, group in zip(values, groups, strict=True):
                    names = [tensor.name for tensor in block.outputs if tensor.name in have]
                    names += [TAKEN] if TAKEN in have and group.wanted else []
                    if any(not_finite(on_host(have[name])) for name in names):
                        return BlockFault(block=block.block, seconds=self._up_to(index, seconds))
                self._forget(index, values)
        return None

    def _tokens(self, batch: Batch) -> NDArray[np.int32]:
        """Returns the tokens of a batch, after checking it."""
        model, pages = self.folder.model, self.pool.pages if self.layout.layers else 0
        return tokens_of(batch, check_segments(batch.segments, limit=model.max_position, pages=pages), model)

    def _waves(self, batch: Batch) -> list[list[SegmentPart]]:
        if self.takes_tokens:
            return waves(batch.segments, one_by_one=self.served.one_by_one)
        return handed_waves(batch.segments, batch.tensors, one_by_one=self.served.one_by_one)

    def _grouped(self, wave: Sequence[SegmentPart], tokens: NDArray[np.int32], batch: Batch) -> list[Group]:
        groups = grouped(
            wave, tokens, batch.wanted, self.served.request, single=self.single, paged=bool(self.layout.layers)
        )
        for group in groups:
            group.inputs.update(joined(group.parts, self.taken, self.names[0]))
        return groups

    def _run(self, groups: Sequence[Group], seconds: dict[str, float]) -> list[dict[str, Value]]:
        """Returns the values that each group has after the last block. Adds the time of each block to `seconds`."""
        values: list[dict[str, Value]] = [dict(group.inputs) for group in groups]
        for index in range(self.first_block, self.last_block + 1):
            self._run_block(index, values, seconds)
            self._forget(index, values)
        self.pages.up += sum(one.nbytes for group in groups for one in group.inputs.values())
        if self.gives_logits:
            self.pages.down += sum(on_host(have[TAKEN]).nbytes for have in values)
        return values

    def _hand_on(self, group: Group, have: Mapping[str, Value], made: list[list[NamedTensors]]) -> set[int]:
        """Adds the tensors that later stages need, of each part of a group, to the list of its segment in `made`:
        outputs of these blocks, and tensors that only pass through. Returns the segments with an output of these blocks
        that is not finite."""
        own = [one for one in self.handed_on if one.maker.index >= self.first_block]
        arrays = {one.name: on_host(have[one.name]) for one in own}
        self.pages.down += sum(array.nbytes for array in arrays.values())
        bad: set[int] = set()
        for part, new in zip(group.parts, cut(arrays, own, len(group.parts)), strict=True):
            if any(not_finite(array) for array in new.values()):
                bad.add(part.number)
            passed: Arrays = {one.name: part.given[one.name] for one in self.handed_on if one.name not in new}
            made[part.number].append(NamedTensors(rows=part.segment.rows, arrays=passed | new))
        return bad

    def _run_block(self, index: int, values: Sequence[dict[str, Value]], seconds: dict[str, float]) -> None:
        """Runs block `index` on each group's values and adds the outputs to them, and its time to `seconds`."""
        name, began = self.wiring.blocks[index - 1].block, time.perf_counter()
        try:
            taken_s = self.blocks.work(index, lambda block: self._put(block, values))
        except Exception as error:  # noqa: BLE001 ONNX Runtime's own exception types have no public common base
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began
            message = str(error) if isinstance(error, ExecutionError) else f"{name} failed: {error}"
            raise ExecutionError(message, block=name, seconds=self._up_to(index, seconds)) from (
                error.__cause__ or error
            )
        seconds[name] = seconds.get(name, 0.0) + taken_s
        self._ran_block()

    def _put(self, block: AsIsBlock, values: Sequence[dict[str, Value]]) -> None:
        """Adds the outputs of `block` to each group's values: all of them, or none if the block fails."""
        outputs = [block.run(have, self.pages.pools) for have in values]
        for have, output in zip(values, outputs, strict=True):
            have |= output

    def _forget(self, index: int, values: Sequence[dict[str, Value]]) -> None:
        """Drops the values that no block after `index` takes."""
        for name in self._last_use.get(index, ()):
            for have in values:
                have.pop(name, None)

    def _up_to(self, index: int, seconds: Mapping[str, float]) -> dict[str, float]:
        """Returns the seconds of the blocks up to `index`: later ones may have run with tokens before these."""
        return {block.block: seconds[block.block] for block in self.wiring.blocks[self.first_block - 1 : index]}


def last_uses(wiring: Wiring) -> dict[int, list[str]]:
    """Returns, by the number of each block, the names of outputs of earlier blocks that it is the last to take."""
    last = {
        name: block.index
        for block, sources in zip(wiring.blocks, wiring.sources, strict=True)
        for name, source in sources.items()
        if isinstance(source, FromBlock)
    }
    return {index: [name for name in last if last[name] == index] for index in set(last.values())}

"""ONNX blocks of a folder as all stages of a device have them: what their files say, and their sessions."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import BlockFolderError, BlockrelayError, ExecutionError
from blockrelay.onnx_blocks.handed_on import HandedOn
from blockrelay.onnx_blocks.model_file import model_without_weights
from blockrelay.onnx_blocks.served_shape import request_inputs, served_shape, served_wiring
from blockrelay_worker.execution.batch import Segment
from blockrelay_worker.execution.onnx.as_is.block import AsIsBlock, Value, attends_one_by_one, on_host
from blockrelay_worker.execution.onnx.as_is.groups import grouped, waves
from blockrelay_worker.execution.onnx.as_is.warm_blocks import WarmBlocks, WarmLimits
from blockrelay_worker.execution.onnx.bound.pages import DevicePages
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider, Provider, Steps
from blockrelay_worker.execution.onnx.tries import TryLimits, reason_of
from blockrelay_worker.execution.page_layout import layout_of, pages_for
from blockrelay_worker.execution.self_test import fixed_tokens

Arrays = Mapping[str, NDArray[Any]]
#: What is asked to see whether a tensor has the number of sequences in it: rows of each.
_PROBED_ROWS = 3


class ServedBlocks:
    """One thread uses it.

    Sessions are made for many steps if all blocks of the folder may be warm at once, and else for one: not those of
    the stages that are here now, since others may come, and a block must compute the same however the folder is cut.
    """

    def __init__(self, folder: BlockFolder, provider: Provider, warm: WarmLimits, tries: TryLimits) -> None:
        assert folder.onnx_root is not None, "a model of ONNX blocks"
        self.folder, self.provider, self.root = folder, provider, folder.onnx_root
        self.wiring = served_wiring(folder.root)
        self.shape = served_shape(self.wiring)
        self.request = request_inputs(self.wiring)
        self._limits, self._tries = warm, tries
        sizes: list[int] = []
        self._seen: list[dict[Path, tuple[int, ...]]] = []
        self.one_by_one = False
        """Several rows are run only where there are none before them."""
        for block in folder.manifest.blocks:
            path = self.root / block.file
            graph = model_without_weights(path, block.file).graph
            beside = _beside(graph.initializer, block.file)
            sizes.append(path.stat().st_size + sum(size for _, size in beside))
            files = {path, *(self.root / place for place, _ in beside)}
            self._seen.append({one: _state(one) for one in sorted(files)})
            self.one_by_one = self.one_by_one or attends_one_by_one(graph)
        self.bytes = self._on_device(sizes)
        """Of each block on the device."""
        self.steps: Steps = "many" if warm.all_of(self.bytes) else "one"
        self.warm = WarmBlocks(self.opened, self.bytes, limits=warm, beside=provider.loads_beside, tries=tries)
        self._counting: dict[str, bool] = {}
        self._integers: dict[tuple[int, int, int], dict[str, NDArray[Any]]] = {}

    def _on_device(self, sizes: list[int]) -> list[int]:
        """ONNX Runtime's CPU provider has float16 in float32, as long as the block is there for more than a step."""
        if self.provider.name != CpuProvider.name or set(self.folder.manifest.precisions) == {"fp32"}:
            return sizes
        wide = [2 * size for size in sizes]
        return wide if self._limits.all_of(wide) else sizes

    def opened(self, index: int) -> AsIsBlock:
        """A session of block `index`. Raises BlockFolderError for one that cannot be loaded, or whose files have
        changed since they were opened; ExecutionError for what this device cannot load now."""
        if altered := [path for path, state in self._seen[index - 1].items() if _state(path) != state]:
            raise BlockFolderError(f"{altered[0]}: altered while it is served: start again to serve what it is now")
        try:
            return AsIsBlock(self.provider, self.root, self.wiring, self.shape, index, steps=self.steps)
        except BlockrelayError:
            raise
        except Exception as error:  # ONNX Runtime's own exception types have no public common base
            signature = self.wiring.blocks[index - 1]
            said = f"{self.root / signature.file}: cannot be loaded on {self.provider.device}: {error}"
            if reason_of(error):
                raise ExecutionError(said, block=signature.block) from error
            raise BlockFolderError(said) from error

    def reference(self, index: int) -> AsIsBlock:
        """Block `index` on ONNX Runtime's CPU provider."""
        return AsIsBlock(CpuProvider(), self.root, self.wiring, self.shape, index, steps="few")

    def pages_for_reference(self, first: int, last: int, pages: int) -> DevicePages:
        """Those of blocks `first` to `last` on ONNX Runtime's CPU provider, all zeros."""
        return self.pages(CpuProvider(), first, last, self.reference(first), pages)

    def pages(self, provider: Provider, first: int, last: int, block: AsIsBlock, pages: int) -> DevicePages:
        """Those of blocks `first` to `last`, all zeros; `block` is any on the device."""
        return DevicePages(
            provider,
            block.session,
            self.folder.model,
            self.layers(first, last),
            layout_of(self.folder, first, last),
            pages=pages,
            dtype=self.shape.dtype,
        )

    def layers(self, first: int, last: int) -> range:
        """The numbers of the layers of blocks `first` to `last`, from 1, as pools are called."""
        before = self.folder.model.layers_in(1, first - 1)
        return range(before + 1, before + self.folder.model.layers_in(first, last) + 1)

    def count_sequences(self, tensors: Sequence[HandedOn]) -> bool:
        """Whether one of these tensors has another value when more sequences run together, as shapes have: then
        sequences must run alone, in the stage that makes it and in those that take it, since others may be beside them
        there. Computed once, of few rows, on ONNX Runtime's CPU provider."""
        asked = [] if self.shape.single else [one for one in tensors if one.may_count]
        if new := [one for one in asked if one.name not in self._counting]:
            one, two = (self._made(new, [(batch, _PROBED_ROWS, 0)])[0] for batch in (1, 2))
            self._counting |= {tensor.name: not np.array_equal(one[tensor.name], two[tensor.name]) for tensor in new}
        return any(self._counting[one.name] for one in asked)

    def integers(
        self, tensors: Sequence[HandedOn], sizes: Collection[tuple[int, int]]
    ) -> dict[tuple[int, int], Arrays]:
        """For one sequence of each of `sizes` (rows, and rows before them) what earlier blocks make of fixed tokens as
        those of these tensors that are integers, which cannot be made up."""
        integers = [one for one in tensors if np.dtype(one.tensor.dtype).kind in "iu"]
        asked = sorted(sizes)
        made = self._made(integers, [(1, *size) for size in asked])
        return dict(zip(asked, made, strict=True))

    def _made(self, tensors: Sequence[HandedOn], runs: Sequence[tuple[int, int, int]]) -> list[dict[str, NDArray[Any]]]:
        """The tensors in runs of so many sequences with rows behind others. Blocks are in memory one by one."""
        names = {one.name for one in tensors}
        missing = [run for run in runs if not names <= self._integers.setdefault(run, {}).keys()]
        if missing:
            last, past = max(one.maker.index for one in tensors), max(rows + past for _, rows, past in missing)
            pages = self.pages_for_reference(1, last, pages_for(past))
            values = [self._inputs(*run, paged=bool(self.layers(1, last))) for run in missing]
            for index in range(1, last + 1):
                block = self.reference(index)
                for have in values:
                    have |= block.run(have, pages.pools)
            for run, have in zip(missing, values, strict=True):
                self._integers[run] |= {name: on_host(have[name]) for name in names}
            pages.close()
        return [{name: self._integers[run][name] for name in names} for run in runs]

    def _inputs(self, batch: int, rows: int, past: int, *, paged: bool) -> dict[str, Value]:
        pages = tuple(range(pages_for(past + rows)))
        segments = [Segment(rows=rows, first_position=past, pages=pages)] * batch
        (wave,) = waves(segments, one_by_one=False)
        (group,) = grouped(wave, fixed_tokens(self.folder.model, batch * rows), (), self.request, paged=paged)
        return dict(group.inputs)


def _beside(tensors: Sequence[TensorProto], own: str) -> list[tuple[str, int]]:
    """The file and the bytes of each tensor that lies in another file than `own`."""
    found: list[tuple[str, int]] = []
    for tensor in tensors:
        told = {str(entry.key): str(entry.value) for entry in tensor.external_data}
        if told.get("location", own) != own:
            found.append((told["location"], int(told.get("length") or 0)))
    return found


def _state(path: Path) -> tuple[int, ...]:
    """What is another one when the file is replaced or written to; nothing of one that has gone."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns

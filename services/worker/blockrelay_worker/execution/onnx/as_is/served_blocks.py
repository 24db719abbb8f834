"""The ONNX blocks of a folder on one device, for all of its stages: facts from their files, and their sessions."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import BlockFolderError, BlockrelayError, ExecutionError
from blockrelay.onnx_blocks.handed_on import HandedOn
from blockrelay.onnx_blocks.model_file import external_data, model_without_weights
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
#: Tokens of each sequence in the probe of `count_sequences`.
_PROBED_ROWS = 3


class ServedBlocks:
    """All blocks of one folder on one device. One thread uses it.

    Sessions are made for many steps if all blocks of the folder may be warm at once, otherwise for one. It does not
    matter which stages are here now: others may come, and a block must compute the same however the folder is cut.
    """

    def __init__(self, folder: BlockFolder, provider: Provider, warm: WarmLimits, tries: TryLimits) -> None:
        """Reads the graphs of all blocks, without weights. Makes no session. `warm` and `tries` limit later ones.

        Raises OnnxBlocksError for files that cannot be read, and for blocks that do not fit together.
        """
        assert folder.onnx_root is not None, "a model of ONNX blocks"
        self.folder, self.provider, self.root = folder, provider, folder.onnx_root
        self.wiring = served_wiring(folder.root)
        self.shape = served_shape(self.wiring)
        self.request = request_inputs(self.wiring)
        self._limits, self._tries = warm, tries
        sizes: list[int] = []
        self._seen: list[dict[Path, tuple[int, ...]]] = []
        self.one_by_one = False
        """True if some block takes several tokens of a sequence only without a past."""
        for block in folder.manifest.blocks:
            path = self.root / block.file
            graph = model_without_weights(path, block.file).graph
            beside = _beside(graph.initializer, block.file)
            sizes.append(path.stat().st_size + sum(size for _, size in beside))
            files = {path, *(self.root / place for place, _ in beside)}
            self._seen.append({one: _state(one) for one in sorted(files)})
            self.one_by_one = self.one_by_one or attends_one_by_one(graph)
        self.bytes = self._on_device(sizes)
        """Bytes of each block on the device."""
        self.steps: Steps = "many" if warm.all_of(self.bytes) else "one"
        self.warm = WarmBlocks(self.opened, self.bytes, limits=warm, beside=provider.loads_beside, tries=tries)
        self._counting: dict[str, bool] = {}
        self._integers: dict[tuple[int, int, int], dict[str, NDArray[Any]]] = {}

    def _on_device(self, sizes: list[int]) -> list[int]:
        """Returns the bytes of blocks on the device. ONNX Runtime's CPU provider widens float16 to float32, unless each
        block is there for one step only."""
        if self.provider.name != CpuProvider.name or set(self.folder.manifest.precisions) == {"fp32"}:
            return sizes
        wide = [2 * size for size in sizes]
        return wide if self._limits.all_of(wide) else sizes

    def opened(self, index: int) -> AsIsBlock:
        """Returns a session of block `index`. Raises BlockFolderError if it cannot be loaded, or if its files have
        changed since they were read first; ExecutionError for what this device cannot load now."""
        if altered := [path for path, state in self._seen[index - 1].items() if _state(path) != state]:
            raise BlockFolderError(f"{altered[0]}: altered while it is served: start again to serve the new file")
        try:
            return AsIsBlock(self.provider, self.root, self.wiring, self.shape, index, steps=self.steps)
        except BlockrelayError:
            raise
        except Exception as error:  # ONNX Runtime's own exception types have no public common base
            signature = self.wiring.blocks[index - 1]
            message = f"{self.root / signature.file}: cannot be loaded on {self.provider.device}: {error}"
            if reason_of(error):
                raise ExecutionError(message, block=signature.block) from error
            raise BlockFolderError(message) from error

    def reference(self, index: int) -> AsIsBlock:
        """Returns a new session of block `index` on ONNX Runtime's CPU provider.

        Raises OnnxBlocksError for a file that cannot be read, and ONNX Runtime's error if it cannot be loaded.
        """
        return AsIsBlock(CpuProvider(), self.root, self.wiring, self.shape, index, steps="few")

    def pages_for_reference(self, first: int, last: int, pages: int) -> DevicePages:
        """Returns `pages` KV pages of blocks `first` to `last` on ONNX Runtime's CPU provider, all zeros.

        Raises OnnxBlocksError if the file of block `first` cannot be read, and ONNX Runtime's error if it cannot be
        loaded.
        """
        return self.pages(CpuProvider(), first, last, self.reference(first), pages)

    def pages(self, provider: Provider, first: int, last: int, block: AsIsBlock, pages: int) -> DevicePages:
        """Returns `pages` KV pages of blocks `first` to `last` on `provider`, all zeros. `block` is any block on that
        device. Raises UsageError for more bytes than the device has in one piece, or ONNX Runtime's error."""
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
        """Returns the numbers of the layers of blocks `first` to `last`, counted from 1, as in the names of pools."""
        before = self.folder.model.layers_in(1, first - 1)
        return range(before + 1, before + self.folder.model.layers_in(first, last) + 1)

    def count_sequences(self, tensors: Sequence[HandedOn]) -> bool:
        """Returns whether one of these tensors depends on how many sequences run together, as shapes do. If so,
        sequences must run alone, in the stage that makes it and in those that take it, where others may run beside
        them. Computed once, with few tokens, on ONNX Runtime's CPU provider. False if the model takes one sequence at a
        time anyway (`shape.single`). Raises OnnxBlocksError for a file that cannot be read, and ONNX Runtime's error if
        a block cannot be loaded or fails."""
        candidates = [] if self.shape.single else [one for one in tensors if one.may_count]
        if new := [one for one in candidates if one.name not in self._counting]:
            one, two = (self._made(new, [(batch, _PROBED_ROWS, 0)])[0] for batch in (1, 2))
            self._counting |= {tensor.name: not np.array_equal(one[tensor.name], two[tensor.name]) for tensor in new}
        return any(self._counting[one.name] for one in candidates)

    def integers(
        self, tensors: Sequence[HandedOn], sizes: Collection[tuple[int, int]]
    ) -> dict[tuple[int, int], Arrays]:
        """Returns those of `tensors` that are integers, which cannot be made up, as earlier blocks compute them from
        fixed tokens: for one sequence of each of `sizes` (new tokens, past tokens), by name. Raises OnnxBlocksError for
        a file that cannot be read, and ONNX Runtime's error if a block cannot be loaded or fails."""
        integers = [one for one in tensors if np.dtype(one.tensor.dtype).kind in "iu"]
        ordered = sorted(sizes)
        made = self._made(integers, [(1, *size) for size in ordered])
        return dict(zip(ordered, made, strict=True))

    def _made(self, tensors: Sequence[HandedOn], runs: Sequence[tuple[int, int, int]]) -> list[dict[str, NDArray[Any]]]:
        """Returns the tensors in `runs` of (sequences, new tokens, past tokens). Blocks are in memory one at a time."""
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
    """Returns file and bytes of each tensor that lies in another file than `own`."""
    files: list[tuple[str, int]] = []
    for tensor in tensors:
        entries = external_data(tensor)
        if entries.get("location", own) != own:
            files.append((entries["location"], int(entries.get("length") or 0)))
    return files


def _state(path: Path) -> tuple[int, ...]:
    """Returns a value that changes when the file is replaced or written to; empty for a file that has gone."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns

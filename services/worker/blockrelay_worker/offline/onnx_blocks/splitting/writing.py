"""Writes the blocks of a split model: the graph of each, with weights linked, copied or cut."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from onnx import ModelProto

from blockrelay import __version__
from blockrelay.errors import OnnxBlocksError, UsageError
from blockrelay.host.unfinished_folder import check_free, is_finished, unfinished_folder
from blockrelay.onnx_blocks.reports.splitting import SplitBegins, SplitBlock, SplitWrites, Weights
from blockrelay.quantities import format_quantity
from blockrelay_worker.offline.onnx_blocks.splitting.block_graphs import block_model, block_name
from blockrelay_worker.offline.onnx_blocks.splitting.planning.plan import SplitPlan, plan_split
from blockrelay_worker.offline.onnx_blocks.splitting.source import SourceModel, read_source
from blockrelay_worker.offline.onnx_blocks.splitting.weights import (
    aligned_bytes,
    beside,
    copy_file,
    cut_weights,
    linked,
    stored_bytes,
    write_graph,
)

#: Estimated bytes of a graph's file beyond its nodes and constants: names and types of inputs and outputs.
_FRAME_BYTES = 64 << 10
_Tell = Callable[[SplitBegins | SplitWrites], None]


def split_model(path: Path, out: Path, *, copy_weights: bool, tell: _Tell) -> None:
    """Writes the blocks of the model at `path` to the folder `out`, which appears only when it is complete.

    `copy_weights`: each block gets a file with its own weights; else all blocks share links to the model's weight
    files, or copies of these. Continues an interrupted run with the same arguments. `tell` gets the reports.

    Raises OnnxBlocksError for a model that cannot be split, and then leaves nothing behind. Raises UsageError if `out`
    is not empty, another run writes it, its disk is too small, or the system is Windows. Also raises it if a run with
    other arguments, files or release left its unfinished folder there. Raises OSError if writing fails; the same run
    can then be continued.
    """
    out = out.absolute()
    source = read_source(path)
    identity = _identity(source, path, copy_weights=copy_weights)
    is_done = is_finished(out, identity)
    if not is_done:
        check_free(out)
    split = _Split(source, plan_split(source.graph), tell)
    if is_done:
        split.begin("cut" if copy_weights else "linked", 0)
        return
    with unfinished_folder(out, identity) as folder:
        if copy_weights and source.weights:
            split.cut(folder)
        else:
            split.share(folder)


def _identity(source: SourceModel, path: Path, *, copy_weights: bool) -> str:
    """The identity of a run: a later run continues an interrupted one only if theirs are equal."""
    files = {name: (path.parent / name).stat() for name in (path.name, *source.weights)}
    return json.dumps(
        {
            "model": str(path.resolve()),
            "files": {name: [facts.st_size, facts.st_mtime_ns] for name, facts in files.items()},
            "copy_weights": copy_weights,
            "release": __version__,
        }
    )


class _Split:
    """One run of a split: writes the files and reports them through `tell`."""

    def __init__(self, source: SourceModel, plan: SplitPlan, tell: _Tell) -> None:
        self._source, self._plan, self._tell = source, plan, tell
        for name in source.weights:
            if name in self._names:
                raise OnnxBlocksError(f"names its weights {name!r}, as a block is called", file=source.graph.file)

    @property
    def _names(self) -> list[str]:
        return [block_name(index) for index in range(1, len(self._plan.blocks) + 1)]

    def begin(self, weights: Weights, size: int) -> None:
        """Reports the blocks that will be written, with `size` bytes in all."""
        sizes = {tensor.name: stored_bytes(tensor) for tensor in self._source.model.graph.initializer}
        makers = self._source.graph.makers()
        blocks = [
            SplitBlock(
                file=name,
                nodes=len(block.nodes),
                border=tuple(name for name in block.inputs if name in makers),
                inputs=tuple(self._plan.renamed.get(name, name) for name in block.inputs),
                outputs=tuple(self._plan.renamed.get(name, name) for name in block.outputs),
                weight_bytes=sum(sizes.get(name, 0) for name in block.constants),
            )
            for name, block in zip(self._names, self._plan.blocks, strict=True)
        ]
        self._tell(SplitBegins(tuple(blocks), weights, size))

    def share(self, folder: Path) -> None:
        """Writes blocks that refer to the model's weight files, which are linked into `folder`, or copied."""
        source = self._source.folder
        copied = [name for name in self._source.weights if not linked(source / name, folder / name)]
        size = sum((source / name).stat().st_size for name in copied)
        self._check_room(folder, size)
        self.begin("copied" if copied else "linked" if self._source.weights else "inside", size + self._graph_bytes())
        for name in copied:
            copy_file(source / name, folder / name, lambda size, name=name: self._wrote(name, size))
        for file, model in self._left(folder):
            self._wrote(file.name, write_graph(model, file))

    def cut(self, folder: Path) -> None:
        """Writes blocks that each have a file with their own weights."""
        models = (block_model(self._source, plan, 1, {}) for plan in self._plan.blocks)
        size = sum(aligned_bytes(beside(model)) for model in models)
        self._check_room(folder, size)
        self.begin("cut", size + self._graph_bytes())
        for file, model in self._left(folder):
            tensors = beside(model)
            data = file.with_name(f"{file.name}.data")
            if tensors:
                cut_weights(self._source.folder, tensors, data, lambda size, name=data.name: self._wrote(name, size))
            self._wrote(file.name, write_graph(model, file))

    def _left(self, folder: Path) -> Iterator[tuple[Path, ModelProto]]:
        """The files and models of blocks that no earlier run has finished; reports the finished ones as written."""
        for index, plan in enumerate(self._plan.blocks, 1):
            file = folder / block_name(index)
            if file.exists():
                of_data = folder / f"{file.name}.data"
                self._wrote(file.name, file.stat().st_size + (of_data.stat().st_size if of_data.exists() else 0))
            else:
                yield file, block_model(self._source, plan, index, self._plan.renamed)

    def _graph_bytes(self) -> int:
        """Estimated bytes of the graphs' files, with the weights that are inside."""
        graph = self._source.model.graph
        constants = {tensor.name: tensor.ByteSize() for tensor in graph.initializer}
        return sum(
            _FRAME_BYTES
            + sum(graph.node[place].ByteSize() for place in block.nodes)
            + sum(constants.get(name, 0) for name in block.constants)
            for block in self._plan.blocks
        )

    def _check_room(self, folder: Path, size: int) -> None:
        """Raises UsageError if the disk has less free space than is still to be written."""
        written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.stat().st_nlink == 1)
        needed, free = size + self._graph_bytes() - written, shutil.disk_usage(folder).free
        if needed > free:
            raise UsageError(
                f"{folder.parent} has no room: the blocks take {format_quantity(needed, 'B')} more, and "
                f"{format_quantity(free, 'B')} are free"
            )

    def _wrote(self, file: str, size: int) -> None:
        self._tell(SplitWrites(file, size))

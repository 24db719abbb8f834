"""Writes the blocks of a model that is cut: the graph of each, and their weights linked, copied or cut."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from onnx import ModelProto

from blockrelay import __version__
from blockrelay.errors import OnnxBlocksError, UsageError
from blockrelay.host.unfinished_folder import check_free, is_finished, unfinished_folder
from blockrelay.onnx_blocks.splitting.plan import SplitPlan, plan_split
from blockrelay.onnx_blocks.splitting.report import (
    SplitBegins,
    SplitBlock,
    SplitWrites,
    Weights,
    encode_begin,
    encode_written,
)
from blockrelay.quantities import format_quantity
from blockrelay_worker.offline.onnx_blocks.splitting.block_graphs import block_model, block_name
from blockrelay_worker.offline.onnx_blocks.splitting.source import Source, read_source
from blockrelay_worker.offline.onnx_blocks.splitting.weights import (
    aligned_bytes,
    beside,
    copy_file,
    cut_weights,
    linked,
    stored_bytes,
    write_graph,
)

#: What the file of a graph takes beyond its nodes and constants: names and types of inputs and outputs.
_FRAME_BYTES = 64 << 10


def split_model(path: Path, out: Path, *, copy_weights: bool, tell: Callable[[str], None]) -> None:
    """Write the blocks of the model to `out`, which is there whole or not at all.

    Raises OnnxBlocksError for a model that cannot be split, UsageError where `out` is taken or has no room for it. Both
    leave nothing behind. With what an earlier run of the same has left it goes on.
    """
    out = out.absolute()
    source = read_source(path)
    of = _identity(source, path, copy_weights=copy_weights)
    is_done = is_finished(out, of)
    if not is_done:
        check_free(out)
    split = _Split(source, plan_split(source.graph), tell)
    if is_done:
        split.begin("cut" if copy_weights else "linked", 0)
        return
    with unfinished_folder(out, of) as folder:
        if copy_weights and source.weights:
            split.cut(folder)
        else:
            split.share(folder)


def _identity(source: Source, path: Path, *, copy_weights: bool) -> str:
    """What a run has to have been about for another one to go on with what it left."""
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
    """One run: what is written where, and what is told of it."""

    def __init__(self, source: Source, plan: SplitPlan, tell: Callable[[str], None]) -> None:
        self._source, self._plan, self._tell = source, plan, tell
        for name in source.weights:
            if name in self._names:
                raise OnnxBlocksError(f"names its weights {name!r}, as a block is called", file=source.graph.file)

    @property
    def _names(self) -> list[str]:
        return [block_name(index) for index in range(1, len(self._plan.blocks) + 1)]

    def begin(self, weights: Weights, size: int) -> None:
        """Tell what there will be."""
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
        self._tell(encode_begin(SplitBegins(tuple(blocks), weights, size)))

    def share(self, folder: Path) -> None:
        """All blocks refer to the model's files of weights, which get second names, or else are copied."""
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
        """Each block gets a file with the weights that it reads."""
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
        """The blocks that no earlier run has finished."""
        for index, plan in enumerate(self._plan.blocks, 1):
            file = folder / block_name(index)
            if file.exists():
                of_data = folder / f"{file.name}.data"
                self._wrote(file.name, file.stat().st_size + (of_data.stat().st_size if of_data.exists() else 0))
            else:
                yield file, block_model(self._source, plan, index, self._plan.renamed)

    def _graph_bytes(self) -> int:
        """About what the files of the graphs take, with the weights inside."""
        graph = self._source.model.graph
        constants = {tensor.name: tensor.ByteSize() for tensor in graph.initializer}
        return sum(
            _FRAME_BYTES
            + sum(graph.node[place].ByteSize() for place in block.nodes)
            + sum(constants.get(name, 0) for name in block.constants)
            for block in self._plan.blocks
        )

    def _check_room(self, folder: Path, size: int) -> None:
        """UsageError where the disk has less left than is still to be written."""
        written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.stat().st_nlink == 1)
        needed, free = size + self._graph_bytes() - written, shutil.disk_usage(folder).free
        if needed > free:
            raise UsageError(
                f"{folder.parent} has no room: the blocks take {format_quantity(needed, 'B')} more, and "
                f"{format_quantity(free, 'B')} are free"
            )

    def _wrote(self, file: str, size: int) -> None:
        self._tell(encode_written(SplitWrites(file, size)))

"""Reads the ONNX file of a block without its weights: its signature, its weight files and its operators.

The file comes from elsewhere, so it is not trusted: weight files outside its folder are refused.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, ValueInfoProto, shape_inference

from blockrelay.block_folder.folder import file_sha256
from blockrelay.onnx_blocks.model_file import (
    constant_names,
    declared_tensors,
    inner_graphs,
    model_without_weights,
    tensors_of,
)
from blockrelay.onnx_blocks.signature import Signature
from blockrelay.onnx_blocks.weight_places import check_inside
from blockrelay_worker.offline.onnx_blocks.weight_files import check_weights


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator that a graph uses."""

    domain: str
    """The domain of its opset; empty for the standard one."""
    kind: str
    """The operator's name, such as `MatMul`."""
    version: int
    """The version of the opset."""
    output: str
    """The name of an output of one of its nodes, for error messages."""

    def __str__(self) -> str:
        return f"{self.domain}:{self.kind}" if self.domain else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxFile:
    """The file of one block, as read. `weights` are the names of its weight files, sorted."""

    path: Path
    signature: Signature
    weights: tuple[str, ...]
    operators: tuple[Operator, ...]
    vocabulary: int | None
    """Number of rows of the table that `input_ids` index; None if this block has none."""
    bytes: int
    """Size of the file itself, without its weight files."""
    sha256: str
    """SHA-256 of the file itself, in hexadecimal."""


def read_onnx_file(folder: Path, name: str, index: int) -> OnnxFile:
    """Reads the file `name` in `folder`, of block `index` (from 1), without its weights.

    Raises OnnxBlocksError with the file, and with the tensor if one is wrong.
    """
    path = check_inside(folder, name, file=name)
    model = model_without_weights(path, name)
    graph = model.graph
    constants = constant_names(graph)
    inputs = declared_tensors(name, "inputs", [value for value in graph.input if value.name not in constants])
    return OnnxFile(
        path=path,
        signature=Signature(index, name, inputs, declared_tensors(name, "outputs", _outputs(model))),
        weights=check_weights(folder, name, tensors_of(model)),
        operators=tuple(_operators(model)),
        vocabulary=_vocabulary(graph),
        bytes=path.stat().st_size,
        sha256=file_sha256(path),
    )


def _outputs(model: ModelProto) -> Sequence[ValueInfoProto]:
    """The outputs of the graph. Dimensions that the file omits, as some exporters do for scalars, are inferred."""
    declared = list(model.graph.output)
    if all(one.type.tensor_type.HasField("shape") for one in declared):
        return declared
    with suppress(shape_inference.InferenceError):
        inferred = {one.name: one for one in shape_inference.infer_shapes(model).graph.output}
        return [one if one.type.tensor_type.HasField("shape") else inferred[one.name] for one in declared]
    return declared


def _vocabulary(graph: GraphProto) -> int | None:
    tables = {tensor.name: tensor.dims for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Gather" and list(node.input[1:]) == ["input_ids"] and node.input[0] in tables:
            return int(tables[node.input[0]][0]) if tables[node.input[0]] else None
    return None


def _nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """The nodes, and those of graphs inside them."""
    for node in nodes:
        yield node
        for inner in inner_graphs(node):
            yield from _nodes(inner.node)


def _operators(model: ModelProto) -> Iterator[Operator]:
    """The operators of a model, each once, without those that the file itself defines."""
    own = {(function.domain, function.name) for function in model.functions}
    seen = set(own)
    parts: tuple[GraphProto | FunctionProto, ...] = (model.graph, *model.functions)
    for part in parts:
        imported = part.opset_import if isinstance(part, FunctionProto) else model.opset_import
        versions = {_domain(str(one.domain)): one.version for one in imported}
        for node in _nodes(part.node):
            key = (_domain(str(node.domain)), str(node.op_type))
            if key not in seen:
                seen.add(key)
                output = next((name for name in node.output if name), node.name)
                yield Operator(*key, versions.get(key[0], 1), str(output))


def _domain(name: str) -> str:
    """The canonical name of an operator domain: the standard one has two names."""
    return "" if name == "ai.onnx" else name

"""Reads a whole decoder from its ONNX file, as input of the split's plan. Does not read weight files."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, shape_inference

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.model_file import constant_names, declared_tensors, inner_graphs, tensors_of, whole_model
from blockrelay_worker.offline.onnx_blocks.splitting.head_dims import with_head_dims
from blockrelay_worker.offline.onnx_blocks.splitting.planning.graph import GraphNode, WholeGraph, in_running_order
from blockrelay_worker.offline.onnx_blocks.weight_files import check_weights

#: Constants up to this many bytes may be shapes, which shape inference needs.
_SMALL_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceModel:
    """The model as it was read. The `index` of a node of `graph` is its place in `model.graph.node`."""

    folder: Path
    """The folder with the model's file and its weight files."""
    model: ModelProto
    graph: WholeGraph
    types: Mapping[str, ValueInfoProto]
    """The type of each input and of each tensor that nodes compute, by name: at least its dtype."""
    weights: tuple[str, ...]
    """Names of its weight files, sorted."""


def read_source(path: Path) -> SourceModel:
    """Reads the model at `path`.

    Raises OnnxBlocksError with the file, and with the tensor if one is wrong. The reasons: it cannot be read, is larger
    than 2 GiB or not ONNX; weights are missing, too short or outside its folder; an input or output has a type that
    blocks cannot have; the graph has a cycle, lacks an input or computes a tensor twice; a name is not UTF-8; type
    inference refuses a node.
    """
    name, folder = path.name, path.parent
    model = whole_model(path, name)
    weights = check_weights(folder, name, tensors_of(model))
    graph = model.graph
    read = [_node(index, node) for index, node in enumerate(graph.node)]
    constants = constant_names(graph)
    made_by = (model.producer_name, model.producer_version, model.domain)
    _check_text(
        name, [*made_by, *constants, *(text for node in read for text in (node.kind, *node.inputs, *node.outputs))]
    )
    inputs = declared_tensors(name, "inputs", [value for value in graph.input if value.name not in constants])
    outputs = declared_tensors(name, "outputs", graph.output)
    nodes = in_running_order(
        name,
        read,
        {tensor.name for tensor in inputs} | constants,
        [tensor.name for tensor in outputs],
    )
    types = _types(name, model, nodes)
    widths = _widths(graph, types)
    return SourceModel(
        folder=folder,
        model=model,
        graph=WholeGraph(
            file=name,
            nodes=nodes,
            inputs=inputs,
            outputs=outputs,
            constants=constants,
            widths=widths,
        ),
        types=with_head_dims(types, graph.node, widths),
        weights=weights,
    )


def _check_text(file: str, names: Iterable[object]) -> None:
    """Raises OnnxBlocksError for names that are bytes: protobuf returns bytes for text that is not UTF-8."""
    if not all(isinstance(name, str) for name in names):
        raise OnnxBlocksError("has a name that is not UTF-8", file=file)


def _node(index: int, node: NodeProto) -> GraphNode:
    inputs = dict.fromkeys(name for name in (*node.input, *_captured(node)) if name)
    return GraphNode(index, node.op_type, tuple(inputs), tuple(name for name in node.output if name))


def _captured(node: NodeProto) -> Iterator[str]:
    """Names of tensors of the outer graph that graphs inside the node read."""
    for graph in inner_graphs(node):
        own = {value.name for value in graph.input} | constant_names(graph)
        for inner in graph.node:
            yield from (name for name in (*inner.input, *_captured(inner)) if name not in own)
            own.update(inner.output)
        yield from (value.name for value in graph.output if value.name not in own)


def _types(file: str, model: ModelProto, nodes: Collection[GraphNode]) -> Mapping[str, ValueInfoProto]:
    """The type of each tensor: as declared, else as ONNX infers it, else with the dtype of its node's first input.

    ONNX's inference knows standard operators only.
    """
    try:
        inferred = shape_inference.infer_shapes(_without_weights(model), strict_mode=False).graph
    except (shape_inference.InferenceError, ValueError) as error:
        raise OnnxBlocksError(f"has nodes that fit nothing: {error}", file=file) from None
    graph = model.graph
    types: dict[str, ValueInfoProto] = {}
    for value in (*graph.input, *graph.output, *graph.value_info, *inferred.value_info):
        if value.type.tensor_type.elem_type:
            types.setdefault(value.name, value)
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in nodes:
        for name in node.outputs:
            if name in types:
                kinds[name] = types[name].type.tensor_type.elem_type
                continue
            kind = next((kinds[one] for one in node.inputs if one in kinds), TensorProto.FLOAT)
            kinds[name] = kind
            types[name] = helper.make_tensor_value_info(name, kind, None)
        kinds |= {name: types[name].type.tensor_type.elem_type for name in node.inputs if name in types}
    return types


def _without_weights(model: ModelProto) -> ModelProto:
    """The model with the values of small constants only, so that inference copies no weights."""
    bare = ModelProto(ir_version=model.ir_version)
    bare.opset_import.extend(model.opset_import)
    bare.functions.extend(model.functions)
    graph = model.graph
    bare.graph.node.extend(graph.node)
    bare.graph.input.extend(graph.input)
    bare.graph.output.extend(graph.output)
    bare.graph.value_info.extend(graph.value_info)
    bare.graph.initializer.extend(
        tensor
        if tensor.ByteSize() <= _SMALL_BYTES
        else TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)
        for tensor in graph.initializer
    )
    return bare


def _widths(graph: GraphProto, types: Mapping[str, ValueInfoProto]) -> Mapping[str, int]:
    """The width of tensors, by name: of a matmul's output the columns of its weights, else by the declared shape.

    By a shape it is the product of the known dimensions. Tensors whose last dimension is not known are left out.
    """
    widths: dict[str, int] = {}
    for name, value in types.items():
        if value.type.tensor_type.HasField("shape"):
            sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            if not sizes or sizes[-1] > 0:
                widths[name] = math.prod(size for size in sizes if size > 0)
    dims = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    for node in graph.node:
        width = _product_width(node, dims)
        if width is not None and node.output:
            widths[node.output[0]] = width
    return widths


def _product_width(node: NodeProto, dims: Mapping[str, list[int]]) -> int | None:
    numbers = {attribute.name: attribute.i for attribute in node.attribute}
    if node.op_type == "MatMulNBits":
        return numbers.get("N")
    is_product = "MatMul" in node.op_type or node.op_type == "Gemm"
    weight = dims.get(node.input[1], []) if is_product and len(node.input) > 1 else []
    if len(weight) != 2:
        return None
    return weight[0] if node.op_type == "Gemm" and numbers.get("transB") else weight[1]

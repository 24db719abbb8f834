"""Builds the ONNX graph of one block: nodes of the whole model, unchanged, with declared inputs and outputs."""

from collections.abc import Mapping

from onnx import ModelProto, NodeProto, ValueInfoProto

from blockrelay.onnx_blocks.model_file import inner_graphs
from blockrelay_worker.offline.onnx_blocks.splitting.planning.graph import SHAPE
from blockrelay_worker.offline.onnx_blocks.splitting.planning.plan import BlockPlan
from blockrelay_worker.offline.onnx_blocks.splitting.source import SourceModel


def block_name(index: int) -> str:
    """The file name of block `index`, from 1."""
    return f"block_{index}.onnx"


def block_model(source: SourceModel, plan: BlockPlan, index: int, renamed: Mapping[str, str]) -> ModelProto:
    """The graph of block `index` (from 1) as a model, with the nodes and tensors of `plan`.

    `renamed` has new names of tensors by their names in the whole model; the others keep theirs. A Shape node that read
    another layer's past reads the block's own (`plan.lengths_from`). Weights stay as in the whole model: in other
    files, or inside.
    """
    whole = source.model
    model = ModelProto(
        ir_version=whole.ir_version,
        producer_name=whole.producer_name,
        producer_version=whole.producer_version,
        domain=whole.domain,
        model_version=whole.model_version,
    )
    model.opset_import.extend(whole.opset_import)
    model.functions.extend(whole.functions)
    model.metadata_props.extend(whole.metadata_props)
    graph = model.graph
    graph.name = f"block_{index}"
    lengths = {**renamed, **{name: renamed.get(own, own) for name, own in plan.lengths_from.items()}}
    for place in plan.nodes:
        node = graph.node.add()
        node.CopyFrom(whole.graph.node[place])
        _rename(node, lengths if node.op_type == SHAPE else renamed)
    graph.input.extend(_declared(source, name, renamed) for name in plan.inputs)
    graph.output.extend(_declared(source, name, renamed) for name in plan.outputs)
    graph.initializer.extend(one for one in whole.graph.initializer if one.name in plan.constants)
    graph.sparse_initializer.extend(one for one in whole.graph.sparse_initializer if one.values.name in plan.constants)
    shown = {name for node in graph.node for name in node.output} - {value.name for value in graph.output}
    graph.value_info.extend(value for value in whole.graph.value_info if value.name in shown)
    return model


def _declared(source: SourceModel, name: str, renamed: Mapping[str, str]) -> ValueInfoProto:
    value = ValueInfoProto()
    value.CopyFrom(source.types[name])
    value.name = renamed.get(name, name)
    return value


def _rename(node: NodeProto, names: Mapping[str, str]) -> None:
    """Renames the tensors that the node, and graphs inside it, read and write."""
    node.input[:] = [names.get(name, name) for name in node.input]
    node.output[:] = [names.get(name, name) for name in node.output]
    for graph in inner_graphs(node):
        for inner in graph.node:
            _rename(inner, names)

"""Whole decoders in one ONNX file, as exporters write them: in small, with random weights by a seed, with `onnx` alone.

`optimum_decoder` is the 33 reference blocks as the one graph that they were cut from. `dynamo_decoder` names nothing
for people and asks for lengths once for all layers. `genai_decoder` (tests.support.models.genai_decoder) has the
operators of ONNX Runtime, whose layers meet in two tensors.
"""

import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from tests.support.models.reference_blocks import ReferenceModel, reference_block

SMALL = ReferenceModel(layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, mlp=128, vocabulary=256)


def optimum_decoder(model: ReferenceModel = SMALL, *, float32: bool = False) -> ModelProto:
    """By the names of the reference contract."""
    blocks = [reference_block(model, index) for index in range(1, model.layers + 2)]
    made = {value.name for block in blocks for value in block.graph.output}
    whole = ModelProto()
    whole.CopyFrom(blocks[0])
    graph = whole.graph
    graph.name = "main_graph"
    seen = {tensor.name for tensor in graph.initializer}
    for block in blocks[1:]:
        graph.node.extend(block.graph.node)
        graph.input.extend(value for value in block.graph.input if value.name not in made)
        graph.initializer.extend(tensor for tensor in block.graph.initializer if tensor.name not in seen)
        seen |= {tensor.name for tensor in block.graph.initializer}
    outputs = [value for block in blocks for value in block.graph.output]
    del graph.output[:]
    graph.output.extend(value for value in outputs if value.name.startswith(("present", "logits")))
    if float32:
        _widen(whole)
    return whole


def dynamo_decoder(model: ReferenceModel = SMALL) -> ModelProto:
    """In float32, by the names of torch's exporter with dynamo: pasts are called `past_0_0`, presents and logits as
    their nodes.

    Every layer takes the batch and the number of positions from one place, which layer 0 could have asked its past for.
    """
    whole = optimum_decoder(model, float32=True)
    graph = whole.graph
    shared = {
        "/batch": helper.make_node("Shape", ["past_key_values.0.key"], ["/batch"], start=0, end=1),
        "/past": helper.make_node("Shape", ["past_key_values.0.key"], ["/past"], start=2, end=3),
        "/new": helper.make_node("Shape", ["input_ids"], ["/new"], start=1, end=2),
        "/total": helper.make_node("Add", ["/past", "/new"], ["/total"]),
    }
    names: dict[str, str] = {}
    for node in graph.node:
        if "self_attn/key/" in node.name or "self_attn/value/" in node.name:
            for axis, name in ((0, "/batch"), (2, "/total")):
                if node.name.endswith(f"/{axis}/Gather"):
                    names[node.output[0]] = name
    nodes = [node for node in graph.node if node.output[0] not in names]
    needless = {node.input[0] for node in graph.node if node.output[0] in names}
    nodes = [*shared.values(), *(node for node in nodes if node.output[0] not in needless)]
    names["logits"] = "linear_28"
    for layer in range(model.layers):
        for number, half in enumerate(("key", "value")):
            names[f"past_key_values.{layer}.{half}"] = f"past_{layer}_{number}"
            names[f"present.{layer}.{half}"] = f"cat_{2 * layer + number}"
    for number, node in enumerate(nodes):
        for name in node.output:
            if name not in names:
                names[name] = f"val_{number}"
    names |= {name: names[other] for name, other in names.items() if other in shared}
    renamed = [_renamed(node, names) for node in nodes]
    del graph.node[:]
    graph.node.extend(renamed)
    for value in (*graph.input, *graph.output):
        value.name = names.get(value.name, value.name)
    return whole


def in_int8(model: ModelProto) -> ModelProto:
    """The model in float32 with its products in int8, as ONNX Runtime's own tool makes it: what goes into a product is
    quantised with a scale that is found while it runs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quantised.onnx"
        quantize_dynamic(saved(model, Path(folder) / "model.onnx"), path, weight_type=QuantType.QInt8)
        return onnx.load_model(path)


def saved(model: ModelProto, path: Path, *, external: bool = False) -> Path:
    """The model in a file; `external`: its weights in one beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    copy = ModelProto()
    copy.CopyFrom(model)
    onnx.save_model(copy, path, save_as_external_data=external, location=f"{path.name}_data", size_threshold=1024)
    return path


def _renamed(node: NodeProto, names: dict[str, str]) -> NodeProto:
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = [names.get(name, name) for name in node.input]
    copy.output[:] = [names.get(name, name) for name in node.output]
    copy.name = f"node_{copy.output[0]}"
    return copy


def _widen(model: ModelProto) -> None:
    """Everything in float16 becomes float32."""
    graph = model.graph
    _widen_types((*graph.input, *graph.output))
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT16:
            wide = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(wide), tensor.name))
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i == TensorProto.FLOAT16:
                attribute.i = TensorProto.FLOAT


def _widen_types(values: Iterable[ValueInfoProto]) -> None:
    for value in values:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT16:
            value.type.tensor_type.elem_type = TensorProto.FLOAT

"""Folders of ONNX blocks with something wrong in them, made from one in which nothing is."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy
import onnx
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

Change = Callable[[Path], object]


def copied(folder: Path, to: Path, *changes: Change) -> Path:
    """A copy of the folder, changed."""
    shutil.copytree(folder, to)
    for change in changes:
        change(to)
    return to


def altered(name: str, alter: Callable[[ModelProto], object]) -> Change:
    """The graph of a file changed, its weights not looked at."""

    def change(folder: Path) -> None:
        model = onnx.load_model(folder / name, load_external_data=False)
        alter(model)
        onnx.save_model(model, folder / name)

    return change


def cut(name: str, part: float) -> Change:
    """A change that leaves this part of a file, from its beginning on."""
    return lambda folder: os.truncate(folder / name, int((folder / name).stat().st_size * part))


def value(name: str, kind: int = TensorProto.FLOAT16, *dims: int | str) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, list(dims))


def retyped(model: ModelProto, name: str, kind: int) -> None:
    """The input `name` declares another type of elements."""
    (one,) = (one for one in model.graph.input if one.name == name)
    one.type.tensor_type.elem_type = kind


def resized(model: ModelProto, name: str, axis: int, size: int) -> None:
    """The input or output `name` declares another number there."""
    (one,) = (one for one in (*model.graph.input, *model.graph.output) if one.name == name)
    one.type.tensor_type.shape.dim[axis].dim_value = size


def unshaped(model: ModelProto, name: str, rank: int) -> None:
    """Nothing tells any more how many dimensions the output `name` has, which are `rank`: the file does not, and it is
    made with a shape that is picked out of another one while the block runs."""
    graph = model.graph
    (one,) = (one for one in graph.output if one.name == name)
    one.type.tensor_type.ClearField("shape")
    (place,) = (place for place, node in enumerate(graph.node) if name in node.output)
    graph.node[place].output[:] = [f"{name}/told"]
    graph.initializer.append(helper.make_tensor(f"{name}/all", TensorProto.BOOL, [rank], [True] * rank))
    parts = [
        helper.make_node("Shape", [f"{name}/told"], [f"{name}/shape"]),
        helper.make_node("Compress", [f"{name}/shape", f"{name}/all"], [f"{name}/picked"], axis=0),
        helper.make_node("Reshape", [f"{name}/told", f"{name}/picked"], [name]),
    ]
    nodes = [*graph.node[: place + 1], *parts, *graph.node[place + 1 :]]
    del graph.node[:]
    graph.node.extend(nodes)


def add_node(model: ModelProto, node: NodeProto, *, domain: str = "") -> None:
    """An operator, of the first version of its set where that is not the standard's, and its output as one of the
    graph's."""
    model.graph.node.append(node)
    if domain:
        model.opset_import.append(helper.make_opsetid(domain, 1))
    model.graph.output.append(value(node.output[0]))


def many_inputs(model: ModelProto, count: int) -> None:
    model.graph.input.extend(value(f"extra_{index}", TensorProto.FLOAT16, 1) for index in range(count))


def externalised(model: ModelProto, location: str) -> None:
    """The first tensor of weights claims to lie elsewhere."""
    tensor = max(model.graph.initializer, key=lambda one: len(one.raw_data))
    size = len(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in (("location", location), ("offset", "0"), ("length", str(size))):
        tensor.external_data.add(key=key, value=text)


def spoils(model: ModelProto, output: str, *, above: float | None = None, hidden: str = "") -> None:
    """The output `output` is NaN: everywhere, or in each row whose `hidden`, an input, is larger than `above`
    somewhere."""
    for node in model.graph.node:
        for index, name in enumerate(node.output):
            if name == output:
                node.output[index] = f"{output}/sound"
    dtype = numpy.float16
    model.graph.initializer.append(numpy_helper.from_array(numpy.full(1, numpy.nan, dtype), "spoiled"))
    if above is None:
        model.graph.node.append(helper.make_node("Add", [f"{output}/sound", "spoiled"], [output]))
        return
    model.graph.initializer.append(numpy_helper.from_array(numpy.full(1, above, dtype), "above"))
    model.graph.node.extend(
        [
            helper.make_node("ReduceMax", [hidden], ["largest"], axes=[-1], keepdims=1),
            helper.make_node("Greater", ["largest", "above"], ["is_above"]),
            helper.make_node("Where", ["is_above", "spoiled", f"{output}/sound"], [output]),
        ]
    )


def marked(model: ModelProto, token: int, value: float) -> None:
    """The embedding of a token has `value` in its first place."""
    (table,) = (one for one in model.graph.initializer if one.name == "model.embed_tokens.weight")
    rows = numpy_helper.to_array(table).copy()
    rows[token, 0] = value
    table.CopyFrom(numpy_helper.from_array(rows, table.name))


def masked_by_infinity(model: ModelProto) -> None:
    """Masks have minus infinity, where they had the least number of their type."""
    changed = 0
    for one in model.graph.initializer:
        if one.data_type == TensorProto.FLOAT16 and numpy_helper.to_array(one).size == 1:
            value = numpy_helper.to_array(one)
            if value.item() == float(numpy.finfo(numpy.float16).min):
                one.CopyFrom(numpy_helper.from_array(numpy.full_like(value, -numpy.inf), one.name))
                changed += 1
    assert changed, "no mask was there"


def spoiled_for(whole: Path, to: Path, token: int) -> Path:
    """A copy of the reference blocks in `whole`, of which block 3 gives NaN for rows of a token; masks have minus
    infinity."""

    def first(model: ModelProto) -> None:
        marked(model, token, 100)
        masked_by_infinity(model)

    def third(model: ModelProto) -> None:
        spoils(model, "/model/layers.2/Add_1_output_0", above=50, hidden="/model/layers.1/Add_1_output_0")

    return copied(whole, to, altered("block_1.onnx", first), altered("block_3.onnx", third))


def counting_sequences(whole: Path, to: Path) -> Path:
    """A copy of the reference blocks in `whole`, of which block 1 gives how many sequences it runs, and block 2 cuts
    its rows by that."""
    hidden = "/model/layers.0/Add_1_output_0"

    def first(model: ModelProto) -> None:
        model.graph.node.append(helper.make_node("Shape", ["input_ids"], ["sequences"], start=0, end=1))
        model.graph.output.append(value("sequences", TensorProto.INT64, 1))

    def second(model: ModelProto) -> None:
        for node in model.graph.node:
            node.input[:] = ["cut" if name == hidden else name for name in node.input]
        rest = numpy_helper.from_array(numpy.array([-1, 64]), "rest")
        model.graph.initializer.append(rest)
        model.graph.input.append(value("sequences", TensorProto.INT64, 1))
        model.graph.node.insert(0, helper.make_node("Concat", ["sequences", "rest"], ["cut/shape"], axis=0))
        model.graph.node.insert(1, helper.make_node("Reshape", [hidden, "cut/shape"], ["cut"]))

    return copied(whole, to, altered("block_1.onnx", first), altered("block_2.onnx", second))

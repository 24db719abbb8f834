"""A builder of ONNX graphs, node by node. Each node is named after its first output."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from blockrelay_worker.execution.onnx.graphs.flavours import FloatType

#: The newest versions that DirectML's newest package reads.
OPSET, MICROSOFT_OPSET, IR_VERSION = 21, 1, 10
MICROSOFT = "com.microsoft"

_TYPES: Mapping[FloatType, int] = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


class GraphBuilder:
    """An ONNX graph under construction, whose floats have one type. Values are known by their names."""

    def __init__(self, dtype: FloatType, *, prefix: str = "") -> None:
        """`dtype`: the type of the graph's floats. `prefix` begins the names of constants, in a graph with others."""
        self.dtype: FloatType = dtype
        self._prefix = prefix
        self.type = _TYPES[dtype]
        self._nodes: list[NodeProto] = []
        self._inputs: dict[str, ValueInfoProto] = {}
        self._outputs: list[ValueInfoProto] = []
        self._constants: dict[str, TensorProto] = {}
        self._known: list[ValueInfoProto] = []

    def input(self, name: str, kind: int, shape: Sequence[int | str]) -> None:
        """Declares an input of the ONNX type `kind`, if there is none of this name. Sizes that vary have names."""
        self._inputs.setdefault(name, helper.make_tensor_value_info(name, kind, list(shape)))

    def output(self, name: str, kind: int, shape: Sequence[int | str]) -> None:
        """Makes the value `name` an output of the ONNX type `kind`."""
        self._outputs.append(helper.make_tensor_value_info(name, kind, list(shape)))

    def result(self, name: str, value: str, shape: Sequence[int | str], kind: int = TensorProto.FLOAT) -> None:
        """Makes `value`, cast to `kind`, the output `name`."""
        self.output(self.cast(value, kind, name), kind, shape)

    def node(self, kind: str, inputs: Sequence[str], output: str, *, domain: str = "", **attributes: Any) -> str:
        """Adds a node of the operator `kind` with one output. Returns the output's name."""
        return self.nodes(kind, inputs, [output], domain=domain, **attributes)

    def nodes(
        self, kind: str, inputs: Sequence[str], outputs: Sequence[str], *, domain: str = "", **attributes: Any
    ) -> str:
        """Adds one node of the operator `kind` with several outputs. Returns the name of the first of them."""
        made = helper.make_node(kind, list(inputs), list(outputs), name=outputs[0], domain=domain, **attributes)
        self._nodes.append(made)
        return outputs[0]

    def split(self, value: str, sizes: Sequence[int], outputs: Sequence[str]) -> list[str]:
        """Splits `value` along the last axis into parts of these sizes. Returns `outputs`."""
        self.nodes("Split", [value, self.integers(*sizes)], outputs, axis=-1)
        return list(outputs)

    def cast(self, value: str, kind: int, output: str) -> str:
        """Casts `value` to the ONNX type `kind`. Returns `output`."""
        return self.node("Cast", [value], output, to=kind)

    def reshape(self, value: str, shape: Sequence[int], output: str, *, known: Sequence[int | str] = ()) -> str:
        """Reshapes `value`. Returns `output`. `known`: its shape for `knows`."""
        self.node("Reshape", [value, self.integers(*shape)], output)
        return self.knows(output, known)

    def knows(self, value: str, shape: Sequence[int | str]) -> str:
        """Declares the shape of `value`, of the graph's type, where ONNX Runtime cannot infer it. An empty shape
        declares nothing.

        ONNX Runtime reuses buffers of equal shapes. It compares each buffer of unknown shape with all free ones, in
        every node: this took most of the time for making a session of many blocks.
        """
        if shape:
            self._known.append(helper.make_tensor_value_info(value, self.type, list(shape)))
        return value

    def integers(self, *values: int) -> str:
        """Returns the name of a constant int64 [len(values)]."""
        return self.constant(f"{self._prefix}integers {' '.join(map(str, values))}", np.array(values, np.int64))

    def number(self, value: float) -> str:
        """Returns the name of a constant scalar of the graph's type."""
        return self.constant(f"{self._prefix}number {value!r}", np.array(value, np.dtype(self.dtype)))

    def constant(self, name: str, value: "np.ndarray[Any, Any]") -> str:
        """Adds the constant `name`, if there is none of this name. Returns the name."""
        self._constants.setdefault(name, numpy_helper.from_array(value, name))
        return name

    def serialized(self, name: str) -> bytes:
        """Returns the ONNX model as bytes: equal graphs give equal bytes."""
        inputs, constants = list(self._inputs.values()), list(self._constants.values())
        graph = helper.make_graph(self._nodes, name, inputs, self._outputs, constants, value_info=self._known)
        made = helper.make_model(
            graph,
            producer_name="blockrelay",
            ir_version=IR_VERSION,
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, MICROSOFT_OPSET)],
        )
        return made.SerializeToString(deterministic=True)

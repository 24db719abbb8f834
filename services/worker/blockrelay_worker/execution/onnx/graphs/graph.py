"""A graph that grows, node by node. Nodes are called after their first output."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from blockrelay_worker.execution.onnx.graphs.flavours import FloatType

#: What DirectML's newest package still reads.
OPSET, MICROSOFT_OPSET, IR_VERSION = 21, 1, 10
MICROSOFT = "com.microsoft"

_TYPES: Mapping[FloatType, int] = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


class Graph:
    """Of floats of one type."""

    def __init__(self, dtype: FloatType) -> None:
        self.dtype: FloatType = dtype
        self.type = _TYPES[dtype]
        self._nodes: list[NodeProto] = []
        self._inputs: list[ValueInfoProto] = []
        self._outputs: list[ValueInfoProto] = []
        self._constants: dict[str, TensorProto] = {}
        self._known: list[ValueInfoProto] = []

    def input(self, name: str, kind: int, shape: Sequence[int | str]) -> None:
        self._inputs.append(helper.make_tensor_value_info(name, kind, list(shape)))

    def output(self, name: str, kind: int, shape: Sequence[int | str]) -> None:
        """Makes the value `name` an output."""
        self._outputs.append(helper.make_tensor_value_info(name, kind, list(shape)))

    def result(self, name: str, value: str, shape: Sequence[int | str], kind: int = TensorProto.FLOAT) -> None:
        """An output of the type `kind`."""
        self.output(self.cast(value, kind, name), kind, shape)

    def node(self, kind: str, inputs: Sequence[str], output: str, *, domain: str = "", **attributes: Any) -> str:
        return self.nodes(kind, inputs, [output], domain=domain, **attributes)

    def nodes(
        self, kind: str, inputs: Sequence[str], outputs: Sequence[str], *, domain: str = "", **attributes: Any
    ) -> str:
        """One node of several outputs; the first of them."""
        made = helper.make_node(kind, list(inputs), list(outputs), name=outputs[0], domain=domain, **attributes)
        self._nodes.append(made)
        return outputs[0]

    def split(self, value: str, sizes: Sequence[int], outputs: Sequence[str]) -> list[str]:
        """Along the last axis."""
        self.nodes("Split", [value, self.integers(*sizes)], outputs, axis=-1)
        return list(outputs)

    def cast(self, value: str, kind: int, output: str) -> str:
        return self.node("Cast", [value], output, to=kind)

    def reshape(self, value: str, shape: Sequence[int], output: str, *, known: Sequence[int | str] = ()) -> str:
        """`known` as of `knows`."""
        self.node("Reshape", [value, self.integers(*shape)], output)
        return self.knows(output, known)

    def knows(self, value: str, shape: Sequence[int | str]) -> str:
        """Say what ONNX Runtime does not find out: the shape of `value`, of the graph's type, if it is given.

        Buffers of equal shapes are used again. Each one of a shape that nobody knows is compared with all that are
        free, in every node: that took most of the time in which a session of many blocks is made.
        """
        if shape:
            self._known.append(helper.make_tensor_value_info(value, self.type, list(shape)))
        return value

    def integers(self, *values: int) -> str:
        """A constant, int64 [len(values)]."""
        return self.constant(f"integers {' '.join(map(str, values))}", np.array(values, np.int64))

    def number(self, value: float) -> str:
        """A constant of the graph's type."""
        return self.constant(f"number {value!r}", np.array(value, np.dtype(self.dtype)))

    def constant(self, name: str, value: "np.ndarray[Any, Any]") -> str:
        """`name`, which is this value from now on."""
        self._constants.setdefault(name, numpy_helper.from_array(value, name))
        return name

    def serialized(self, name: str) -> bytes:
        constants = list(self._constants.values())
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, constants, value_info=self._known)
        made = helper.make_model(
            graph,
            producer_name="blockrelay",
            ir_version=IR_VERSION,
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, MICROSOFT_OPSET)],
        )
        return made.SerializeToString(deterministic=True)

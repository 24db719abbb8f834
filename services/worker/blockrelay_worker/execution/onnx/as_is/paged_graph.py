"""Changes the graph of a block that others made so that its KV is in our pages.

What the block takes as a past is gathered from the pools. The new positions of what it gives as a present are written
to them, in place. Nothing else of the graph changes. Pools are as in `graphs.pages`, with layers counted from 1. The
added nodes take

    blockrelay/pages  int64 [B, N]   pages of each sequence from position 0 on, N >= 1; with a past of 0 any
    blockrelay/past   int64 [1]      positions there are already, the same in all sequences
    blockrelay/slots  int64 [R, 2]   page and slot for the keys and values of each row
    blockrelay/take   int64 [n]      rows of [B * S] whose logits are wanted; only with the block that makes logits

and give `blockrelay/logits` float32 [n, vocabulary] in place of all rows.
"""

from collections.abc import Sequence
from typing import Any

from onnx import ModelProto, NodeProto, TensorProto, helper

from blockrelay.onnx_blocks.served_shape import LOGITS, ServedShape
from blockrelay.onnx_blocks.wiring import FromPast, Wiring
from blockrelay_worker.kernels.specification import PAGE

PAGES, PAST, SLOTS, TAKE, TAKEN = (f"blockrelay/{name}" for name in ("pages", "past", "slots", "take", "logits"))
#: End of a slice that goes to the end of the axis.
_END = 2**62


def put_into_pages(model: ModelProto, wiring: Wiring, shape: ServedShape, index: int) -> None:
    """Changes `model`, the graph of block `index`: its pasts and presents are in the pools afterwards."""
    graph = _Added(model, shape)
    for name, source in wiring.sources[index - 1].items():
        if isinstance(source, FromPast):
            graph.gather(name, shape.pool_of(source.slot))
    for slot, present in wiring.presents.items():
        if present.index == index:
            graph.write(present.name, shape.pool_of(slot))
    graph.take_logits()
    graph.close()


class _Added:
    """The nodes that are added before and after those of a graph."""

    def __init__(self, model: ModelProto, shape: ServedShape) -> None:
        self._graph, self._vocabulary = model.graph, shape.vocabulary
        self._heads, self._size = shape.kv_heads, shape.head_dim
        self._type = TensorProto.FLOAT16 if shape.dtype == "float16" else TensorProto.FLOAT
        self._inputs = {one.name: one for one in self._graph.input}
        self._outputs = {one.name: one for one in self._graph.output}
        self._before: list[NodeProto] = []
        self._after: list[NodeProto] = []
        self._there: set[str] = set()

    def gather(self, name: str, pool: str) -> None:
        """Replaces the past `name`, an input, by what is gathered from `pool`."""
        self._add_pool(pool)
        self._input(PAGES, ["B", "N"])
        past = self._node(self._before, "Gather", [pool, PAGES], f"{pool}/found")
        shape = self._integers(f"{pool}/shape", 0, -1, self._heads, self._size)  # the first axis is kept
        past = self._node(self._before, "Reshape", [past, shape], f"{pool}/positions")
        start, axis, past_length = self._integers("blockrelay/0", 0), self._integers("blockrelay/1", 1), self._past()
        past = self._node(self._before, "Slice", [past, start, past_length, axis], f"{pool}/past")
        self._node(self._before, "Transpose", [past], name, perm=[0, 2, 1, 3])
        self._graph.input.remove(self._inputs[name])

    def write(self, name: str, pool: str) -> None:
        """Replaces the present `name`, an output, by `pool` with the new positions written."""
        self._add_pool(pool)
        self._input(SLOTS, ["R", 2])
        end, axis = self._integers("blockrelay/end", _END), self._integers("blockrelay/2", 2)
        new = self._node(self._after, "Slice", [name, self._past(), end, axis], f"{pool}/new")
        new = self._node(self._after, "Transpose", [new], f"{pool}/new_rows", perm=[0, 2, 1, 3])
        shape = self._integers(f"{pool}/row_shape", -1, self._heads, self._size)
        new = self._node(self._after, "Reshape", [new, shape], f"{pool}/rows")
        written = self._node(self._after, "ScatterND", [pool, SLOTS, new], f"{pool}_out")
        self._graph.output.append(helper.make_tensor_value_info(written, self._type, self._pool_shape))
        self._graph.output.remove(self._outputs[name])

    def take_logits(self) -> None:
        """Replaces the logits of all rows, if the block makes logits, by those of the wanted rows."""
        if LOGITS not in self._outputs:
            return
        self._input(TAKE, ["n"])
        shape = self._integers("blockrelay/logit_shape", -1, self._vocabulary)
        rows = self._node(self._after, "Reshape", [LOGITS, shape], "blockrelay/rows")
        rows = self._node(self._after, "Gather", [rows, TAKE], "blockrelay/taken")
        self._node(self._after, "Cast", [rows], TAKEN, to=TensorProto.FLOAT)
        self._graph.output.append(helper.make_tensor_value_info(TAKEN, TensorProto.FLOAT, ["n", self._vocabulary]))
        self._graph.output.remove(self._outputs[LOGITS])

    def close(self) -> None:
        """Puts the added nodes into the graph."""
        nodes = [*self._before, *self._graph.node, *self._after]
        del self._graph.node[:]
        self._graph.node.extend(nodes)

    def _past(self) -> str:
        return self._input(PAST, [1])

    def _input(self, name: str, shape: list[int | str]) -> str:
        if name not in self._there:
            self._there.add(name)
            self._graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, shape))
        return name

    @property
    def _pool_shape(self) -> list[int | str]:
        return ["pages of the pool", PAGE, self._heads, self._size]

    def _add_pool(self, pool: str) -> None:
        if pool not in self._there:
            self._there.add(pool)
            self._graph.input.append(helper.make_tensor_value_info(pool, self._type, self._pool_shape))

    def _integers(self, name: str, *values: int) -> str:
        if name not in self._there:
            self._there.add(name)
            self._graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [len(values)], values))
        return name

    def _node(self, where: list[NodeProto], kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        where.append(helper.make_node(kind, list(inputs), [output], name=output, **attributes))
        return output

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

from collections.abc import Collection

from onnx import GraphProto, ModelProto, TensorProto

from blockrelay.onnx_blocks.served_shape import LOGITS, ServedShape
from blockrelay.onnx_blocks.wiring import FromPast, Wiring
from blockrelay_worker.execution.onnx.graphs.graph import GraphBuilder
from blockrelay_worker.kernels.specification import PAGE

PAGES, PAST, SLOTS, TAKE, TAKEN = (f"blockrelay/{name}" for name in ("pages", "past", "slots", "take", "logits"))
#: End of a slice that goes to the end of the axis.
_END = 2**62


def put_into_pages(model: ModelProto, wiring: Wiring, shape: ServedShape, index: int) -> Collection[str]:
    """Changes `model`, the graph of block `index` (from 1): its pasts and presents are in the pools afterwards.

    Returns the names of the pools that it writes. The output for the pool NAME is `NAME_out`.
    """
    theirs, graph = model.graph, _Paged(shape)
    pasts = {
        name: shape.pool_of(source.slot)
        for name, source in wiring.sources[index - 1].items()
        if isinstance(source, FromPast)
    }
    presents = {
        present.name: shape.pool_of(slot) for slot, present in wiring.presents.items() if present.index == index
    }
    for name, pool in pasts.items():
        graph.gather(name, pool)
    graph.add_nodes_of(theirs)
    for name, pool in presents.items():
        graph.write(name, pool)
    if any(one.name == LOGITS for one in theirs.output):
        graph.take_logits()
    graph.replace(theirs, pasts.keys(), {*presents, LOGITS})
    return presents.values()


class _Paged(GraphBuilder):
    """A graph of others with nodes before and after theirs, which gather from pools and write to them."""

    def __init__(self, shape: ServedShape) -> None:
        super().__init__(shape.dtype, prefix="blockrelay/")
        self._vocabulary, self._heads = shape.vocabulary, (shape.kv_heads, shape.head_dim)
        self._pool_shape = ("pages of the pool", PAGE, *self._heads)

    def gather(self, name: str, pool: str) -> None:
        """Makes the past `name` of what is gathered from `pool`."""
        self.input(pool, self.type, self._pool_shape)
        self.input(PAGES, TensorProto.INT64, ["B", "N"])
        self.input(PAST, TensorProto.INT64, [1])
        past = self.node("Gather", [pool, PAGES], f"{pool}/found")
        past = self.reshape(past, [0, -1, *self._heads], f"{pool}/positions")  # the first axis is kept
        past = self.node("Slice", [past, self.integers(0), PAST, self.integers(1)], f"{pool}/past")
        self.node("Transpose", [past], name, perm=[0, 2, 1, 3])

    def add_nodes_of(self, graph: GraphProto) -> None:
        """Adds the nodes of `graph` after those that make its pasts."""
        self._nodes += graph.node

    def write(self, name: str, pool: str) -> None:
        """Makes an output of `pool` with the new positions of the present `name` written."""
        self.input(pool, self.type, self._pool_shape)
        self.input(SLOTS, TensorProto.INT64, ["R", 2])
        self.input(PAST, TensorProto.INT64, [1])
        new = self.node("Slice", [name, PAST, self.integers(_END), self.integers(2)], f"{pool}/new")
        new = self.node("Transpose", [new], f"{pool}/new_rows", perm=[0, 2, 1, 3])
        new = self.reshape(new, [-1, *self._heads], f"{pool}/rows")
        self.output(self.node("ScatterND", [pool, SLOTS, new], f"{pool}_out"), self.type, self._pool_shape)

    def take_logits(self) -> None:
        """Makes an output of the logits of the wanted rows."""
        self.input(TAKE, TensorProto.INT64, ["n"])
        rows = self.reshape(LOGITS, [-1, self._vocabulary], "blockrelay/rows")
        rows = self.node("Gather", [rows, TAKE], "blockrelay/taken")
        self.result(TAKEN, rows, ["n", self._vocabulary])

    def replace(self, graph: GraphProto, old_inputs: Collection[str], old_outputs: Collection[str]) -> None:
        """Puts what was added into `graph`, without its `old_inputs` and `old_outputs`."""
        inputs = [one for one in graph.input if one.name not in old_inputs]
        outputs = [one for one in graph.output if one.name not in old_outputs]
        del graph.node[:], graph.input[:], graph.output[:]
        graph.node.extend(self._nodes)
        graph.input.extend([*inputs, *self._inputs.values()])
        graph.output.extend([*outputs, *self._outputs])
        graph.initializer.extend(self._constants.values())

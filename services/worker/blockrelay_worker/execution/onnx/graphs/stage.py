"""The graph of a stage: consecutive blocks as one ONNX model. Its flavours differ in attention.

Weights are inputs, so that sessions share one copy on the device. Inputs and outputs, beside those of the flavour
(`plain`, `paged`) and the pools (`pages`):

    inputs    tokens int32 [R] (a stage with block 1) or hidden float32 [R, H]
              take int64 [n]         rows whose logits are wanted (a stage with the last block)
              cos, sin               [max_position, head_dim / 2], and the weights by block (`weight_shapes`)
    outputs   hidden_out float32 [R, H], or logits float32 [n, vocab] and sums float32 [R]: the sum of each row before
              the head, which shows whether the row is finite

Nodes are named after their block (`block_3/o`), so that an error of ONNX Runtime names the block.
"""

from collections.abc import Mapping

from onnx import TensorProto

from blockrelay.block_folder.model import ModelConfig
from blockrelay_worker.execution.onnx.graphs import linears, paged, plain
from blockrelay_worker.execution.onnx.graphs.flavours import PLAIN, Flavour, FloatType
from blockrelay_worker.execution.onnx.graphs.graph import GraphBuilder
from blockrelay_worker.execution.onnx.graphs.linears import PLAIN_FORM, BlockForm


def weight_shapes(model: ModelConfig, block: int, bits: int = 0) -> dict[str, tuple[int, ...]]:
    """Returns the weights of a block: name -> shape, in the order of the graph's inputs. `bits` of small weights of its
    linear layers, as in `linears`; 0: floats."""

    def linear(kind: str) -> dict[str, tuple[int, ...]]:
        return linears.shapes(kind, *model.linear_shape(kind), bits)

    if block == model.blocks:
        return {"norm_final": (model.hidden_size,), **linear("head")}
    weights: dict[str, tuple[int, ...]] = {}
    if block == 1:
        weights["embedding"] = (model.vocab_size, model.hidden_size)
    weights["norm_attention"] = (model.hidden_size,)
    weights |= linear("qkv")
    if model.qkv_bias:
        weights["qkv.bias"] = (model.qkv_columns,)
    if model.qk_norm:
        weights["norm_q"] = weights["norm_k"] = (model.head_dim,)
    weights |= linear("o")
    weights["norm_mlp"] = (model.hidden_size,)
    return weights | linear("gate_up") | linear("down")


def stage_graph(
    model: ModelConfig,
    first_block: int,
    last_block: int,
    flavour: Flavour,
    forms: Mapping[int, BlockForm] | None = None,
    *,
    pages: int | None = None,
) -> bytes:
    """Returns the ONNX model of blocks `first_block..last_block`. `forms`: the form of their linear layers by block
    (missing: PLAIN_FORM). `pages`: for steps of single tokens, with page tables of this width; None: for all batches.
    The flavour `plain` ignores it. The bytes depend on the arguments alone."""
    forms = forms or {}
    graph = GraphBuilder(flavour.dtype)
    layers = range(first_block, min(last_block, model.layers) + 1)
    if layers:
        (plain if flavour == PLAIN else paged).describe_batch(graph, model, pages)
    if first_block == 1:
        graph.input("tokens", TensorProto.INT32, ["R"])
    else:
        graph.input("hidden", TensorProto.FLOAT, ["R", model.hidden_size])
    for block in range(first_block, last_block + 1):
        few = forms.get(block, PLAIN_FORM).bits
        for name, shape in weight_shapes(model, block, few).items():
            kind = TensorProto.UINT8 if linears.is_packed(name, few) else graph.type
            graph.input(f"block_{block}/{name}", kind, shape)
    if first_block == 1:
        x = graph.node("Gather", ["block_1/embedding", "tokens"], "block_1/x")
    else:
        x = graph.cast("hidden", graph.type, f"block_{first_block}/x")
    for block in layers:
        x = _layer(graph, model, flavour, block, x, forms.get(block, PLAIN_FORM))
    if last_block == model.blocks:
        graph.input("take", TensorProto.INT64, ["n"])
        place = f"block_{last_block}/"
        wide = graph.cast(x, TensorProto.FLOAT, f"{place}wide")  # a float16 sum of finite numbers may overflow
        graph.result("sums", graph.node("ReduceSum", [wide, graph.integers(-1)], f"{place}sums", keepdims=0), ["R"])
        x = _norm(graph, model, graph.node("Gather", [x, "take"], f"{place}taken"), f"{place}norm_final")
        head = model.linear_shape("head")
        few, longest = forms.get(last_block, PLAIN_FORM).bits, flavour.longest_sum
        x = linears.matmul(graph, x, f"{place}head", head, few, f"{place}product", longest, "n")
        graph.result("logits", x, ["n", model.vocab_size])
    else:
        graph.result("hidden_out", x, ["R", model.hidden_size])
    return graph.serialized(f"block_{first_block} to block_{last_block}")


def attention_graph(model: ModelConfig, flavour: Flavour) -> bytes:
    """Returns the attention of one layer as a model: `qkv` float32 [R, (heads + 2 kv_heads) head_dim] -> `attended`
    float32 [R, heads * head_dim]. It also takes the flavour's inputs, and the pools of `block_1`, which it writes."""
    graph = GraphBuilder(flavour.dtype)
    (plain if flavour == PLAIN else paged).describe_batch(graph, model)
    graph.input("qkv", TensorProto.FLOAT, ["R", model.qkv_columns])
    q, k, v = _heads(graph, model, "block_1/", graph.cast("qkv", graph.type, "block_1/qkv_product"))
    x = (plain if flavour == PLAIN else paged).attention(graph, model, "block_1/", q, k, v)
    graph.result("attended", x, ["R", model.heads * model.head_dim])
    return graph.serialized("attention")


def sum_graph(dtype: FloatType) -> bytes:
    """Returns the model `a` [n] + `b` [n] -> `c`: the least that a device can be tried with."""
    graph = GraphBuilder(dtype)
    for name in ("a", "b"):
        graph.input(name, graph.type, ["n"])
    graph.result("c", graph.node("Add", ["a", "b"], "sum"), ["n"], graph.type)
    return graph.serialized("sum")


def _layer(graph: GraphBuilder, model: ModelConfig, flavour: Flavour, block: int, x: str, form: BlockForm) -> str:
    """Adds attention and MLP of one layer: x [R, H] -> [R, H]."""
    place = f"block_{block}/"

    def linear(kind: str, x: str) -> str:
        shape = model.linear_shape(kind)
        output, longest = f"{place}{kind}_product", flavour.longest_sum
        return linears.matmul(graph, x, f"{place}{kind}", shape, form.bits, output, longest)

    qkv = linear("qkv", _norm(graph, model, x, f"{place}norm_attention"))
    if model.qkv_bias:
        qkv = graph.node("Add", [qkv, f"{place}qkv.bias"], f"{place}qkv_biased")
    q, k, v = _heads(graph, model, place, qkv)
    if model.qk_norm:
        q, k = _norm(graph, model, q, f"{place}norm_q"), _norm(graph, model, k, f"{place}norm_k")
    attended = (plain if flavour == PLAIN else paged).attention(graph, model, place, q, k, v)
    x = graph.node("Add", [x, linear("o", attended)], f"{place}attended")
    y = linear("gate_up", _norm(graph, model, x, f"{place}norm_mlp"))
    gate, up = graph.split(y, [model.intermediate_size] * 2, [f"{place}gate", f"{place}up"])
    gate = graph.node("Mul", [gate, graph.node("Sigmoid", [gate], f"{place}sigmoid")], f"{place}silu")
    y = graph.node("Mul", [gate, up], f"{place}activated")
    if form.hadamard:
        y = linears.hadamard(graph, y, model.intermediate_size, form.hadamard, f"{place}spread")
    return graph.node("Add", [x, linear("down", y)], f"{place}out")


def _norm(graph: GraphBuilder, model: ModelConfig, x: str, weight: str) -> str:
    return graph.node(
        "SimplifiedLayerNormalization", [x, weight], f"{weight}_out", axis=-1, epsilon=model.rms_norm_eps, stash_type=1
    )


def _heads(graph: GraphBuilder, model: ModelConfig, place: str, qkv: str) -> tuple[str, str, str]:
    """Splits qkv [R, (heads + 2 kv_heads) head_dim] into queries [R, heads, head_dim], and keys and values [R,
    kv_heads, head_dim]."""
    counts = {"q": model.heads, "k": model.kv_heads, "v": model.kv_heads}
    parts = graph.split(qkv, [count * model.head_dim for count in counts.values()], [f"{place}{n}" for n in counts])
    q, k, v = (
        graph.reshape(part, [-1, count, model.head_dim], f"{part}_heads", known=["R", count, model.head_dim])
        for part, count in zip(parts, counts.values(), strict=True)
    )
    return q, k, v

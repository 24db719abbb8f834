"""What a split decides, on graphs of a few nodes."""

from collections.abc import Sequence

import pytest

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.signature import Tensor
from blockrelay_worker.offline.onnx_blocks.splitting.planning.graph import GraphNode, WholeGraph, in_running_order
from blockrelay_worker.offline.onnx_blocks.splitting.planning.plan import BlockPlan, plan_split

#: kind, inputs, output
Line = tuple[str, str, str]
_WIDE, _NARROW = 400, 100


def layer(k: int, hidden: str, *, mask: str = "mask", more: Sequence[Line] = ()) -> list[Line]:
    """Attention over keys and values that are made of what comes in, and a product behind it, each added to it."""
    at = f"l{k}."
    return [
        ("MatMul", f"{hidden} w", f"{at}k"),
        ("Concat", f"past_key_values.{k}.key {at}k", f"present.{k}.key"),
        ("Concat", f"past_key_values.{k}.value {at}k", f"present.{k}.value"),
        *more,
        ("Attention", f"{hidden} present.{k}.key present.{k}.value {mask}", f"{at}attended"),
        ("Add", f"{hidden} {at}attended", f"{at}middle"),
        ("MatMul", f"{at}middle w", f"{at}up"),
        ("MatMul", f"{at}up w", f"{at}down"),
        ("Add", f"{at}middle {at}down", f"{at}sum"),
    ]


def decoder(
    *lines: Line, layers: int = 2, outputs: Sequence[str] = ("logits",), more: Sequence[Tensor] = ()
) -> WholeGraph:
    """A graph of these lines with caches for so many layers. `up` is wide; the rest is as wide as the hidden state."""
    caches = [(k, half) for k in range(layers) for half in ("key", "value")]
    cache = ("batch", 2, "positions", 4)
    inputs = [
        Tensor("input_ids", "int64", ("b", "s")),
        Tensor("attention_mask", "int64", ("b", "t")),
        *(Tensor(f"past_key_values.{k}.{half}", "float32", cache) for k, half in caches),
        *more,
    ]
    nodes = [GraphNode(index, kind, tuple(read.split()), (made,)) for index, (kind, read, made) in enumerate(lines)]
    declared = [
        *(Tensor(name, "float32", ("b", "s", 9)) for name in outputs),
        *(Tensor(f"present.{k}.{half}", "float32", cache) for k, half in caches),
    ]
    constants = {"w", "table", "one"}
    nodes = in_running_order(
        "model.onnx", nodes, {one.name for one in inputs} | constants, [one.name for one in declared]
    )
    known = {made: _WIDE if made.endswith("up") else _NARROW for _, _, made in lines}
    return WholeGraph(
        file="model.onnx", nodes=nodes, inputs=inputs, outputs=declared, constants=constants, widths=known
    )


EMBED: list[Line] = [("Gather", "table input_ids", "embedded"), ("Cast", "attention_mask", "mask")]
HEAD: list[Line] = [("Norm", "l1.sum", "normed"), ("MatMul", "normed w", "logits")]


def borders(graph: WholeGraph) -> list[set[str]]:
    """What each block takes from others."""
    given = {one.name for one in graph.inputs}
    return [set(block.inputs) - given for block in plan_split(graph).blocks]


def kinds(graph: WholeGraph, block: BlockPlan) -> list[str]:
    by_index = {node.index: node.kind for node in graph.nodes}
    return [by_index[index] for index in block.nodes]


def test_a_block_for_each_layer_and_one_for_norm_and_head() -> None:
    graph = decoder(*EMBED, *layer(0, "embedded"), *layer(1, "l0.sum"), *HEAD)
    first, second, head = plan_split(graph).blocks
    assert first.inputs == ("input_ids", "attention_mask", "past_key_values.0.key", "past_key_values.0.value")
    assert first.outputs == ("mask", "l0.sum", "present.0.key", "present.0.value")
    assert second.inputs == ("l0.sum", "mask", "past_key_values.1.key", "past_key_values.1.value")
    assert second.outputs == ("l1.sum", "present.1.key", "present.1.value")
    assert (head.inputs, head.outputs, kinds(graph, head)) == (("l1.sum",), ("logits",), ["Norm", "MatMul"])
    assert first.constants == {"table", "w"}


def test_one_layer_and_a_head() -> None:
    graph = decoder(*EMBED, *layer(0, "embedded"), ("MatMul", "l0.sum w", "logits"), layers=1)
    assert borders(graph) == [set(), {"l0.sum"}]


def test_the_next_layers_norm_and_casts_are_its_own() -> None:
    lines = [("Cast", "l0.sum", "cast"), ("Norm", "cast", "normed0")]
    graph = decoder(*EMBED, *layer(0, "embedded"), *lines, *layer(1, "normed0"), *HEAD)
    assert borders(graph) == [set(), {"l0.sum", "mask"}, {"l1.sum"}]


def test_nodes_may_be_in_any_order() -> None:
    graph = decoder(*reversed([*EMBED, *layer(0, "embedded"), *layer(1, "l0.sum"), *HEAD]))
    assert borders(graph) == [set(), {"l0.sum", "mask"}, {"l1.sum"}]


def test_without_a_head_the_last_layer_has_the_rest() -> None:
    graph = decoder(*EMBED, *layer(0, "embedded"), *layer(1, "l0.sum"), ("Norm", "l1.sum", "state"), outputs=["state"])
    assert borders(graph) == [set(), {"l0.sum", "mask"}]
    assert plan_split(graph).blocks[-1].outputs == ("state", "present.1.key", "present.1.value")


def test_states_between_layers_that_are_outputs_come_from_where_they_are() -> None:
    graph = decoder(*EMBED, *layer(0, "embedded"), *layer(1, "l0.sum"), *HEAD, outputs=["logits", "embedded", "l0.sum"])
    first, second, head = plan_split(graph).blocks
    assert set(first.outputs) == {"mask", "embedded", "l0.sum", "present.0.key", "present.0.value"}
    assert "l0.sum" not in second.outputs and head.outputs == ("logits",)


def test_what_a_later_layer_reads_of_an_earlier_one_is_handed_on() -> None:
    """Such as layers that share keys and values."""
    shared: list[Line] = [("Attention", "l0.sum present.0.key", "looked"), ("Add", "l0.sum looked", "both")]
    graph = decoder(*EMBED, *layer(0, "embedded"), *shared, *layer(1, "both"), *HEAD)
    assert borders(graph)[1] in ({"both", "mask"}, {"l0.sum", "present.0.key", "mask"})
    assert sum(len(block.nodes) for block in plan_split(graph).blocks) == len(graph.nodes)


def test_a_mask_of_each_layer_is_made_there() -> None:
    """From the one that block 1 hands on, and from the length of the layer's own keys."""
    lines: list[list[Line]] = [
        [("Shape", f"present.{k}.key", f"length{k}"), ("Slice", f"mask length{k}", f"mask{k}")] for k in (0, 1)
    ]
    graph = decoder(
        *EMBED,
        *layer(0, "embedded", mask="mask0", more=lines[0]),
        *layer(1, "l0.sum", mask="mask1", more=lines[1]),
        *HEAD,
    )
    assert borders(graph) == [set(), {"l0.sum", "mask"}, {"l1.sum"}]
    assert "Slice" in kinds(graph, plan_split(graph).blocks[1])


def test_lengths_of_a_past_are_asked_of_each_blocks_own() -> None:
    lines: list[Line] = [
        ("Shape", "past_key_values.0.key", "shape"),
        ("Gather", "shape one", "past"),
        ("Range", "past one", "places"),
        ("Add", "mask places", "summed"),
        ("Unsqueeze", "past one", "lengths"),
    ]
    attended = [("Expand", f"summed lengths l{k}.k", f"mask{k}") for k in (0, 1)]
    graph = decoder(
        *EMBED,
        *lines,
        *layer(0, "embedded", mask="mask0", more=attended[:1]),
        *layer(1, "l0.sum", mask="mask1", more=attended[1:]),
        *HEAD,
    )
    first, second, _ = plan_split(graph).blocks
    assert borders(graph)[1] == {"l0.sum", "summed"}  # a Range grows with positions: it is made once
    assert second.lengths_from == {"past_key_values.0.key": "past_key_values.1.key"} and not first.lengths_from
    assert {"Shape", "Gather", "Unsqueeze"} <= set(kinds(graph, second))
    assert "Range" not in kinds(graph, second)


def test_constants_that_nodes_make_are_made_in_each_block() -> None:
    lines: list[Line] = [("Constant", "", "made"), ("Dequantize", "made one", "weight")]
    scaled = [("Mul", f"{hidden} weight", f"l{k}.more") for k, hidden in ((0, "embedded"), (1, "l0.sum"))]
    graph = decoder(
        *EMBED,
        *lines,
        *scaled[:1],
        *layer(0, "l0.more"),
        *scaled[1:],
        *layer(1, "l1.more"),
        *HEAD,
    )
    first, second, _ = plan_split(graph).blocks
    assert {"Constant", "Dequantize"} <= set(kinds(graph, first)) & set(kinds(graph, second))
    assert borders(graph)[1] == {"l0.sum", "mask"}


def test_a_graph_without_anything_between_two_attentions() -> None:
    lines: list[Line] = [
        ("Concat", "past_key_values.0.key embedded", "present.0.key"),
        ("Concat", "past_key_values.0.value embedded", "present.0.value"),
        ("Concat", "past_key_values.1.key past_key_values.0.key", "present.1.key"),
        ("Concat", "past_key_values.1.value present.0.value", "present.1.value"),
        ("MatMul", "present.1.value w", "logits"),
    ]
    with pytest.raises(OnnxBlocksError, match=r"^model\.onnx: past_key_values\.0\.key: "):
        plan_split(decoder(*EMBED, *lines))


def test_an_output_that_no_input_changes() -> None:
    graph = decoder(
        *EMBED, *layer(0, "embedded"), *layer(1, "l0.sum"), *HEAD, ("Constant", "", "same"), outputs=["logits", "same"]
    )
    with pytest.raises(OnnxBlocksError, match="same: is an output that no input changes"):
        plan_split(graph)


def test_two_hundred_layers_take_seconds() -> None:
    layers = [line for k in range(200) for line in layer(k, f"l{k - 1}.sum" if k else "embedded")]
    head: list[Line] = [("Norm", "l199.sum", "normed"), ("MatMul", "normed w", "logits")]
    plan = plan_split(decoder(*EMBED, *layers, *head, layers=200))
    assert [len(block.nodes) for block in plan.blocks] == [10, *[8] * 199, 2]


@pytest.mark.parametrize(
    ("more", "outputs", "renamed"),
    [
        ([], ["linear_28"], {"linear_28": "logits"}),
        ([("Shape", "linear_28", "logits")], ["linear_28"], {}),
        ([("Norm", "linear_28", "second")], ["linear_28", "second"], {}),
    ],
)
def test_what_torch_calls_as_its_node_is_called_logits(
    more: Sequence[Line], outputs: Sequence[str], renamed: dict[str, str]
) -> None:
    """Only where it can be nothing else, and the name is free."""
    head = [("Norm", "l1.sum", "normed"), ("MatMul", "normed w", "linear_28"), *more]
    graph = decoder(*EMBED, *layer(0, "embedded"), *layer(1, "l0.sum"), *head, outputs=outputs)
    assert plan_split(graph).renamed == renamed


def test_logits_keep_their_name() -> None:
    assert not plan_split(decoder(*EMBED, *layer(0, "embedded"), *layer(1, "l0.sum"), *HEAD)).renamed

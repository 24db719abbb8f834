"""The shape of ONNX blocks served as they are: layers by block, keys and values of a layer in the same block."""

from collections.abc import Sequence

import pytest

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.cache_names import CacheSlot
from blockrelay.onnx_blocks.served_shape import served_shape
from blockrelay.onnx_blocks.signature import Signature, Tensor
from blockrelay.onnx_blocks.wiring import Wiring, wire

B, S, P, T = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"
HEAD = Tensor("logits", "float16", (B, S, 512))


def model(*layers: Sequence[tuple[int, str]]) -> Wiring:
    """Blocks with these halves of layers; the first takes tokens, and the last gives logits."""
    blocks: list[Signature] = []
    for index, halves in enumerate(layers, 1):
        inputs = [Tensor(f"past.{layer}.{half}", "float16", (B, 2, P, 16)) for layer, half in halves]
        outputs = [Tensor(f"present.{layer}.{half}", "float16", (B, 2, T, 16)) for layer, half in halves]
        hidden = [Tensor(f"hidden_{number}", "float16", (B, S, 64)) for number in (index - 1, index)]
        inputs += [Tensor("input_ids", "int64", (B, S)) if index == 1 else hidden[0]]
        outputs += [HEAD if index == len(layers) else hidden[1]]
        blocks.append(Signature(index, f"block_{index}.onnx", tuple(inputs), tuple(outputs)))
    return wire(blocks)


def both(*layers: int) -> list[tuple[int, str]]:
    return [(layer, half) for layer in layers for half in ("key", "value")]


def test_layers_are_counted_in_the_order_of_their_blocks() -> None:
    shape = served_shape(model([], both(7, 3), both(0), []))
    assert (shape.layers, shape.block_layers) == ((3, 7, 0), (0, 2, 1, 0))
    assert shape.pool_of(CacheSlot(0, "key")) == "block_3/keys"


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (
            ([(0, "key"), (1, "value")], [(0, "value"), (1, "key")]),
            "block_1.onnx: present.0.key: is the keys of layer 0, and block_2.onnx makes present.0.value: the keys and "
            "values of a layer must be made by one block",
        ),
        (([(0, "key")], both(1)), "block_1.onnx: present.0.key: layer 0 has no values"),
    ],
)
def test_the_keys_and_values_of_a_layer_are_made_by_one_block(
    layers: Sequence[Sequence[tuple[int, str]]], said: str
) -> None:
    with pytest.raises(OnnxBlocksError) as refused:
        served_shape(model(*layers))
    assert str(refused.value) == said

"""Blocks are wired by name: one source for every input, a past for every present, neighbours that agree."""

import re
from collections.abc import Sequence

import pytest

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.cache_names import CacheSlot
from blockrelay.onnx_blocks.signature import Dimension, Signature, Tensor
from blockrelay.onnx_blocks.wiring import FromBlock, FromPast, FromRequest, Present, wire

B, S, P, T = "batch_size", "sequence_length", "past_sequence_length", "past_sequence_length + sequence_length"


def tensor(name: str, *dims: Dimension, dtype: str = "float16") -> Tensor:
    return Tensor(name, dtype, dims)


IDS = tensor("input_ids", B, S, dtype="int64")
MASK = tensor("mask", B, 1, S, T)
HIDDEN = tensor("hidden_1", B, S, 64)


def past(layer: int) -> tuple[Tensor, ...]:
    return tuple(tensor(f"past_key_values.{layer}.{half}", B, 2, P, 16) for half in ("key", "value"))


def present(layer: int) -> tuple[Tensor, ...]:
    return tuple(tensor(f"present.{layer}.{half}", B, 2, T, 16) for half in ("key", "value"))


def block(index: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Signature:
    return Signature(index, f"block_{index}.onnx", tuple(inputs), tuple(outputs))


def model() -> list[Signature]:
    """Three blocks; the mask of the first goes to the second past none, the head takes the last hidden rows."""
    return [
        block(1, [IDS, *past(0)], [MASK, HIDDEN, *present(0)]),
        block(2, [MASK, HIDDEN, *past(1)], [tensor("hidden_2", B, S, 64), *present(1)]),
        block(3, [tensor("hidden_2", B, S, 64), MASK], [tensor("logits", B, S, 512)]),
    ]


def test_every_input_has_its_source() -> None:
    wiring = wire(model())
    assert wiring.sources[0] == {
        "input_ids": FromRequest(),
        "past_key_values.0.key": FromPast(CacheSlot(0, "key")),
        "past_key_values.0.value": FromPast(CacheSlot(0, "value")),
    }
    assert wiring.sources[1]["mask"] == wiring.sources[2]["mask"] == FromBlock(1)
    assert wiring.sources[2]["hidden_2"] == FromBlock(2)
    assert wiring.presents[CacheSlot(1, "value")] == Present(2, "present.1.value")
    assert len(wiring.presents) == 4
    assert wiring.consumed() == {"mask", "hidden_1", "hidden_2"}


def test_nothing_about_llama_is_assumed() -> None:
    only = block(1, [tensor("position_ids", "x", "y", dtype="int32")], [tensor("anything", dtype="bool")])
    assert wire([only]).sources == ({"position_ids": FromRequest()},)


def test_several_blocks_may_look_at_one_past() -> None:
    first, second, third = model()
    second = block(2, [*second.inputs, past(0)[0]], second.outputs)
    assert wire([first, second, third]).sources[1]["past_key_values.0.key"] == FromPast(CacheSlot(0, "key"))


def test_one_exporter_may_name_pasts_and_another_presents() -> None:
    names = [tensor("past_key_values_key_0", B, 2, P, 16), tensor("past_key_values_0_value", B, 2, P, 16)]
    assert len(wire([block(1, [IDS, *names], present(0))]).presents) == 2


def with_input(index: int, added: Tensor) -> list[Signature]:
    blocks = model()
    one = blocks[index - 1]
    blocks[index - 1] = block(index, [*one.inputs, added], one.outputs)
    return blocks


def with_output(index: int, added: Tensor) -> list[Signature]:
    blocks = model()
    one = blocks[index - 1]
    blocks[index - 1] = block(index, one.inputs, [*one.outputs, added])
    return blocks


def replaced(index: int, changed: Tensor) -> list[Signature]:
    blocks = model()
    one = blocks[index - 1]
    inputs, outputs = (
        tuple(changed if each.name == changed.name else each for each in side) for side in (one.inputs, one.outputs)
    )
    blocks[index - 1] = block(index, inputs, outputs)
    return blocks


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (
            with_input(2, tensor("elsewhere", B)),
            "block_2.onnx: elsewhere: has no source: neither the request (input_ids, attention_mask, position_ids) nor "
            "an earlier block has it",
        ),
        (
            with_input(1, tensor("hidden_2", B, S, 64)),
            "block_1.onnx: hidden_2: is made only by block_2.onnx, which comes later: blocks run in order",
        ),
        (
            with_input(2, tensor("hidden_2", B, S, 64)),
            "block_2.onnx: hidden_2: is made only by itself: blocks run in order",
        ),
        (with_output(2, MASK), "block_2.onnx: mask: has two sources: block_1.onnx makes it too"),
        (with_output(2, IDS), "block_2.onnx: input_ids: has two sources: the request brings it too"),
        (
            with_output(3, tensor("present_key_0", B, 2, T, 16)),
            "block_3.onnx: present_key_0: is the keys of layer 0, and so is present.0.key",
        ),
        (with_output(3, past(7)[0]), "block_3.onnx: past_key_values.7.key: is an output that is called like a past"),
        (
            with_output(3, present(7)[0]),
            "block_3.onnx: present.7.key: is the keys of layer 7, and no block takes its past",
        ),
        (
            with_input(3, past(7)[1]),
            "block_3.onnx: past_key_values.7.value: is the values of layer 7 so far, and no block gives its present",
        ),
        (
            replaced(2, tensor("hidden_1", B, S, 64, dtype="float32")),
            "block_2.onnx: hidden_1: is float32, and block_1.onnx has it as float16",
        ),
        (
            replaced(2, tensor("hidden_1", B, S, 128)),
            "block_2.onnx: hidden_1: is (batch_size, sequence_length, 128), and block_1.onnx has it as "
            "(batch_size, sequence_length, 64)",
        ),
        (
            replaced(2, tensor("hidden_1", B, 64)),
            "block_2.onnx: hidden_1: is (batch_size, 64), and block_1.onnx has it as (batch_size, sequence_length, 64)",
        ),
        (
            replaced(1, tensor("input_ids", B, S, dtype="float16")),
            "block_1.onnx: input_ids: is float16, and a request brings int64 or int32",
        ),
        (
            replaced(1, tensor("input_ids", B, 1, S, dtype="int64")),
            "block_1.onnx: input_ids: has 3 dimensions, and a request brings 2: batch and positions",
        ),
        (
            replaced(1, tensor("past_key_values.0.key", B, 2, P, 16, dtype="float32")),
            "block_1.onnx: past_key_values.0.key: is float32, and its present present.0.key in block_1.onnx is float16",
        ),
        (
            replaced(1, tensor("past_key_values.0.key", B, 4, 128, 16)),
            "block_1.onnx: past_key_values.0.key: is (batch_size, 4, 128, 16), and its present present.0.key in "
            "block_1.onnx is (batch_size, 2, past_sequence_length + sequence_length, 16)",
        ),
    ],
)
def test_what_does_not_fit_is_named(blocks: list[Signature], message: str) -> None:
    with pytest.raises(OnnxBlocksError, match=f"^{re.escape(message)}$") as raised:
        wire(blocks)
    assert raised.value.file is not None and raised.value.tensor is not None


def test_what_a_file_leaves_open_contradicts_nothing() -> None:
    wire(replaced(2, Tensor("hidden_1", "float16", None)))
    wire(replaced(2, tensor("hidden_1", "unk__1", "", 64)))
    wire(replaced(1, Tensor("past_key_values.0.key", "float16", None)))

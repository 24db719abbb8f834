"""Sizes of dimensions that a graph leaves open follow from their names, or else from the kind of tensor."""

import pytest

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.cache_names import CacheSlot
from blockrelay.onnx_blocks.dimensions import BlockDimensions, StepSizes
from blockrelay.onnx_blocks.signature import Dimension, Tensor
from blockrelay.onnx_blocks.wiring import FromBlock, FromPast, FromRequest, Source

SIZES = StepSizes(batch=5, new=10, past=3)
PAST, BLOCK, REQUEST = FromPast(CacheSlot(0, "key")), FromBlock(1), FromRequest()


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("batch_size", 5),
        ("Batch", 5),
        ("sequence_length", 10),
        ("past_sequence_length", 3),
        ("total_sequence_length", 13),
        ("past_sequence_length + sequence_length", 13),
        ("past_sequence_length + 1", 13),
        ("sequence_length+2", 12),
        ("unk__17", None),
        ("past_sequence_length + unk__17", None),
        ("batch_size * 8", None),
        ("", None),
    ],
)
def test_names_that_exporters_give(name: str, size: int | None) -> None:
    assert SIZES.named(name) == size


@pytest.mark.parametrize(
    ("name", "dims", "source", "shape"),
    [
        ("input_ids", ("unk__0", "unk__1"), REQUEST, (5, 10)),
        ("attention_mask", ("unk__0", "unk__2"), REQUEST, (5, 13)),
        ("attention_mask", ("batch_size", "sequence_length"), REQUEST, (5, 13)),
        ("position_ids", ("", ""), REQUEST, (5, 10)),
        ("past", ("b", 8, "unk__3", 128), PAST, (5, 8, 3, 128)),
        ("past", ("b", "past_length", 8, 128), PAST, (5, 3, 8, 128)),
        ("past", ("", "", 8, 128), PAST, (5, 3, 8, 128)),
        ("hidden", ("", "", 64), BLOCK, (5, 10, 64)),
        ("mask", ("", "", "", ""), BLOCK, (5, 1, 10, 13)),
        ("cos", ("", "", "", 16), BLOCK, (5, 1, 10, 16)),
        ("ids", ("", ""), BLOCK, (5, 10)),
        ("places", ("",), BLOCK, (10,)),
        ("number", (), BLOCK, ()),
        ("fixed", (2, 7), BLOCK, (2, 7)),
    ],
)
def test_shapes_of_inputs(name: str, dims: tuple[Dimension, ...], source: Source, shape: tuple[int, ...]) -> None:
    assert BlockDimensions("f", SIZES).of_input(Tensor(name, "float16", dims), source) == shape


def test_what_a_block_gave_tells_what_no_name_does() -> None:
    dimensions = BlockDimensions("f", SIZES)
    assert dimensions.of_input(Tensor("a", "float16", ("unk__1", "width")), BLOCK, (7, 64)) == (7, 64)
    assert dimensions.of_input(Tensor("b", "float16", ("", "", "width")), BLOCK) == (5, 10, 64), "the name is known now"
    assert dimensions.of_input(Tensor("c", "float16", None), BLOCK, (2, 3)) == (2, 3)


@pytest.mark.parametrize(
    ("tensor", "source", "given", "message"),
    [
        (Tensor("t", "float16", ("", "", "")), BLOCK, None, "f: t: is .*nothing tells how long dimension 2 is"),
        (Tensor("t", "float16", None), BLOCK, None, "f: t: declares no dimensions"),
        (
            Tensor("t", "float16", (5, 64)),
            BLOCK,
            (5, 32),
            r"is \(5, 64\) here, and the block that makes it gave \(5, 32\)",
        ),
        (Tensor("t", "float16", (5, 64)), BLOCK, (5, 1, 64), r"is \(5, 64\), and the block .* gave \(5, 1, 64\)"),
        (Tensor("input_ids", "int64", (1, "s")), REQUEST, None, r"is \(1, s\), which is none of batch 5, sequence 10"),
        (Tensor("t", "float16", ("b", 8, 2048, 128)), PAST, None, "none of batch 5, sequence 10 and past 3"),
    ],
)
def test_what_cannot_be_fed_is_named(
    tensor: Tensor, source: Source, given: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(OnnxBlocksError, match=message):
        BlockDimensions("f", SIZES).of_input(tensor, source, given)


@pytest.mark.parametrize(
    ("dims", "shape", "is_present", "problem"),
    [
        (("batch_size", "sequence_length", 64), (5, 10, 64), False, ""),
        (("batch_size", "sequence_length", 64), (5, 10, 32), False, "t: is (5, 10, 32), and the file declares"),
        (("batch_size", "sequence_length", 64), (5, 9, 64), False, "where sequence_length is 10"),
        (("batch_size", 64), (5, 10, 64), False, "t: is (5, 10, 64), and the file declares (batch_size, 64)"),
        (("unk__1", "unk__1"), (4, 4), False, ""),
        (("unk__1", "unk__1"), (4, 5), False, "where unk__1 is 4"),
        (None, (4, 5), False, ""),
        (("b", 8, "past_sequence_length + 1", 128), (5, 8, 13, 128), True, ""),
        (("b", 8, "unk__1", 128), (5, 8, 3, 128), True, "t: is (5, 8, 3, 128), and the file declares"),
    ],
)
def test_outputs_are_as_declared(
    dims: tuple[Dimension, ...] | None, shape: tuple[int, ...], is_present: bool, problem: str
) -> None:
    found = BlockDimensions("f", SIZES).contradiction(Tensor("t", "float16", dims), shape, is_present=is_present)
    assert problem in found and bool(problem) == bool(found)

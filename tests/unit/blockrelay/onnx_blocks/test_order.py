"""Files of a folder become blocks by the number in their names."""

import pytest

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.signature import MAX_TENSORS, check_names, in_order


def test_by_number_and_not_by_letters() -> None:
    names = [f"block_{index}.onnx" for index in (10, 2, 1, 3, 4, 5, 6, 7, 8, 9)]
    assert in_order(names) == [f"block_{index}.onnx" for index in range(1, 11)]
    assert in_order(["llama-02.onnx", "llama-01.onnx"]) == ["llama-01.onnx", "llama-02.onnx"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["block_1.onnx", "block_3.onnx"], "block_2.onnx is missing"),
        (["b_01.onnx", "b_03.onnx"], "b_02.onnx is missing"),
        (["block_2.onnx"], "block_1.onnx is missing"),
        ([], "block_1.onnx is missing"),
        (["block_1.onnx", "block_01.onnx"], "has the number of"),
        (["block_1.onnx", "layer_2.onnx"], "layer_2.onnx: is not called like block_1.onnx"),
        (["model.onnx"], "model.onnx: has no number"),
        (["block_0.onnx", "block_1.onnx"], "block_0.onnx: has no number of a block"),
        (["block_1.onnx", "block_99999999999999999999.onnx"], "has no number of a block"),
        (["block_1.onnx", "block_999999999.onnx"], "block_2.onnx is missing"),
    ],
)
def test_what_is_no_sequence_is_refused(names: list[str], words: str) -> None:
    with pytest.raises(OnnxBlocksError, match=words):
        in_order(names)


def test_names_of_tensors_are_few_unique_and_readable() -> None:
    check_names("block_1.onnx", "inputs", ["a", "b"])
    for names, words in (
        (["a", "b", "a"], "block_1.onnx: a: comes twice among the inputs"),
        ([str(index) for index in range(MAX_TENSORS + 1)], "block_1.onnx: 1,025 inputs"),
        (["a\nb"], "not printable"),
        ([""], "empty"),
        (["x" * 501], "too long"),
    ):
        with pytest.raises(OnnxBlocksError, match=words):
            check_names("block_1.onnx", "inputs", names)

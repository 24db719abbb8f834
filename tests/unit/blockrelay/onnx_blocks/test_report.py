"""The lines in which a worker reports a check are decoded to what was encoded."""

import pytest

from blockrelay.errors import WireError
from blockrelay.onnx_blocks.report import (
    CheckBegins,
    CheckedBlock,
    CheckedTensor,
    decode_begin,
    decode_checked,
    encode_begin,
    encode_checked,
)


def test_lines_arrive() -> None:
    begin = CheckBegins((("block_1", "block_1.onnx"), ("block_2", "block_2.onnx")))
    assert decode_begin(encode_begin(begin).encode()) == begin
    checked = CheckedBlock(
        block="block_1",
        file="block_1.onnx",
        problem="",
        load_seconds=0.5,
        seconds=0.25,
        nodes=10,
        nodes_on_cpu=2,
        inputs=(CheckedTensor("a", "float16", ["batch", 64], "float16", [5, 64]),),
        outputs=(CheckedTensor("b", "float16", None),),
    )
    assert decode_checked(encode_checked(checked).encode()) == checked
    assert checked.passed and checked.as_json()["passed"] is True


@pytest.mark.parametrize("line", [b"", b"{", b"{}", b'{"passed": 1}'])
def test_anything_else_is_refused(line: bytes) -> None:
    for decode in (decode_begin, decode_checked):
        with pytest.raises(WireError):
            decode(line)

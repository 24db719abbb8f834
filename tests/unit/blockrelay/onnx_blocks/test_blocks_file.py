"""`blocks.json` says what a folder was, and a file that has changed since is named."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockrelay.block_folder.manifest import FileSpec
from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.blocks_file import (
    BlockFiles,
    check_unaltered,
    decode_blocks_file,
    encode_blocks_file,
    read_blocks_file,
)
from blockrelay.onnx_blocks.signature import Signature, Tensor

SHARED = {"weights.bin": FileSpec(sha256="c" * 64, bytes=100)}


def graph(index: int, size: int = 10, sha256: str = "a" * 64) -> dict[str, FileSpec]:
    return {f"block_{index}.onnx": FileSpec(sha256=sha256, bytes=size)}


def block(index: int, files: dict[str, FileSpec] | None = None) -> BlockFiles:
    name = f"block_{index}.onnx"
    tensors = (Tensor("a", "float16", ("batch", 1, "")), Tensor("b", "int64", None), Tensor("c", "bool", ()))
    return BlockFiles(Signature(index, name, tensors, tensors[:1]), graph(index) | (files or {}))


BLOCKS = (block(1, SHARED), block(2, SHARED), block(3))


def test_what_is_written_is_read() -> None:
    text = encode_blocks_file(BLOCKS)
    assert decode_blocks_file(text.encode(), "blocks.json") == BLOCKS
    assert encode_blocks_file(BLOCKS) == text


def broken(**changes: Any) -> bytes:
    value = json.loads(encode_blocks_file(BLOCKS))
    value.update(changes)
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"[]", "expected an object"),
        (broken(format="other"), "format must be one of"),
        (broken(more=1), "unknown field 'more'"),
        (broken(blocks=[{}]), "field 'name' is missing"),
        (broken(blocks=[{"name": "block_1", "file": "x", "files": {}, "inputs": [], "outputs": []}]), "first of files"),
    ],
)
def test_anything_else_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(OnnxBlocksError, match=message):
        decode_blocks_file(content, "blocks.json")


def test_a_file_that_is_not_there_or_too_large_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(OnnxBlocksError, match=r"nothing\.json: No such file"):
        read_blocks_file(tmp_path / "nothing.json")
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(OnnxBlocksError, match=r"large\.json: larger than 64 MiB"):
        read_blocks_file(tmp_path / "large.json")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            (*BLOCKS[:2], block(3, {"new.bin": FileSpec(sha256="e" * 64, bytes=1)})),
            "new.bin: not listed in blocks.json",
        ),
        (BLOCKS[:2], "block_3.onnx: missing; blocks.json lists it"),
        ((BLOCKS[0], BLOCKS[1], replace(BLOCKS[2], files=graph(3, size=9))), "9 bytes"),
        (
            (BLOCKS[0], BLOCKS[1], replace(BLOCKS[2], files=graph(3, sha256="b" * 64))),
            "block_3.onnx: altered: its SHA-256 is not the one in blocks.json",
        ),
        (
            (*BLOCKS[:2], replace(BLOCKS[2], signature=replace(BLOCKS[2].signature, inputs=()))),
            "block_3.onnx: blocks.json says other inputs or outputs",
        ),
    ],
)
def test_what_has_changed_is_named(found: tuple[BlockFiles, ...], message: str) -> None:
    check_unaltered(BLOCKS, BLOCKS, "blocks.json")
    with pytest.raises(OnnxBlocksError, match=message):
        check_unaltered(BLOCKS, found, "blocks.json")

"""A folder that cannot be checked: exit code 2 and one line that names the file and the tensor."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from onnx import ModelProto, TensorProto, helper

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.blocks_file import encode_blocks_file
from blockrelay.onnx_blocks.wiring import wire
from blockrelay_worker.offline.onnx_blocks.check import run
from blockrelay_worker.offline.onnx_blocks.folder import open_onnx_folder
from blockrelay_worker.offline.onnx_blocks.onnx_file import read_onnx_file
from tests.support.models.altered_blocks import (
    Change,
    add_node,
    altered,
    copied,
    cut,
    externalised,
    many_inputs,
    resized,
    retyped,
    value,
)
from tests.support.models.lfs import POINTER
from tests.support.models.reference_blocks import ReferenceModel, reference_block

pytestmark = pytest.mark.onnx_blocks

HIDDEN = "/model/layers.0/Add_1_output_0"
MASK = "/model/ScatterND_output_0"


def overwritten(name: str, content: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content) and None


def listed(folder: Path) -> None:
    """With a blocks.json."""
    (folder / "blocks.json").write_text(encode_blocks_file(open_onnx_folder(folder).facts()))


def flipped(folder: Path) -> None:
    """A bit of a weight is another one."""
    content = bytearray((folder / "block_2.onnx").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "block_2.onnx").write_bytes(content)


def linked_out(folder: Path) -> None:
    (folder.parent / "elsewhere.data").write_bytes(bytes(1 << 20))
    (folder / "link.data").symlink_to(folder.parent / "elsewhere.data")


def unknown(kind: str, domain: str) -> Callable[[ModelProto], object]:
    node = helper.make_node(kind, [HIDDEN], ["made"], domain=domain)
    return lambda model: add_node(model, node, domain=domain)


def sequence_input(model: ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_sequence_value_info("several", TensorProto.FLOAT, [1]))


def negative(model: ModelProto) -> None:
    resized(model, HIDDEN, 1, -2)


def nameless_node(model: ModelProto) -> None:
    add_node(model, helper.make_node("New\nline", [HIDDEN], ["made\t" * 400]))


REFUSED: dict[str, tuple[list[Change], list[str]]] = {
    "a block is missing": ([lambda folder: (folder / "block_2.onnx").unlink()], ["block_2.onnx is missing"]),
    "a wrong dtype": (
        [altered("block_2.onnx", lambda model: retyped(model, HIDDEN, TensorProto.FLOAT))],
        ["block_2.onnx", HIDDEN, "float32", "block_1.onnx", "float16"],
    ),
    "a cycle": (
        [altered("block_1.onnx", lambda model: model.graph.input.append(value("logits")))],
        ["block_1.onnx", "logits", "block_4.onnx, which comes later"],
    ),
    "two sources": (
        [altered("block_3.onnx", lambda model: model.graph.output.append(value(HIDDEN)))],
        ["block_3.onnx", HIDDEN, "two sources", "block_1.onnx"],
    ),
    "no source": (
        [altered("block_3.onnx", lambda model: model.graph.input.append(value("beam_idx")))],
        ["block_3.onnx", "beam_idx", "has no source"],
    ),
    "a shape that contradicts its neighbour": (
        [altered("block_3.onnx", lambda model: resized(model, "/model/layers.1/Add_1_output_0", 2, 128))],
        ["block_3.onnx", "/model/layers.1/Add_1_output_0", "128", "block_2.onnx", "64"],
    ),
    "an altered file": ([listed, flipped], ["block_2.onnx", "altered", "SHA-256", "blocks.json"]),
    "a listed file that was cut off": ([listed, cut("block_2.onnx", 0.9)], ["block_2.onnx", "altered", "blocks.json"]),
    "the last block is missing": (
        [lambda folder: (folder / "block_4.onnx").unlink()],
        ["block_3.onnx", "no output logits"],
    ),
    "a file that was cut off": ([cut("block_3.onnx", 0.5)], ["block_3.onnx", "not an ONNX file, or a part of one"]),
    "an empty file": ([cut("block_3.onnx", 0)], ["block_3.onnx", "not an ONNX file with a graph"]),
    "no ONNX": ([overwritten("block_4.onnx", b"GGUF" + bytes(1000))], ["block_4.onnx", "not an ONNX file"]),
    "an operator that nobody has": (
        [altered("block_2.onnx", unknown("Frobnicate", ""))],
        ["block_2.onnx", "made", "Frobnicate of version 17", "does not have"],
    ),
    "an operator of others": (
        [altered("block_2.onnx", unknown("Frobnicate", "com.example"))],
        ["block_2.onnx", "made", "com.example:Frobnicate"],
    ),
    "an operator whose name is no line": ([altered("block_2.onnx", nameless_node)], ["block_2.onnx", "not printable"]),
    "ten thousand inputs": (
        [altered("block_2.onnx", lambda model: many_inputs(model, 10_000))],
        ["block_2.onnx", "10,006 inputs", "at most 1,024"],
    ),
    "weights in a folder above": (
        [altered("block_2.onnx", lambda model: externalised(model, "../elsewhere.data"))],
        ["block_2.onnx", "model.layers.1.mlp", "outside the folder"],
    ),
    "weights at an absolute path": (
        [altered("block_2.onnx", lambda model: externalised(model, "/etc/passwd"))],
        ["block_2.onnx", "model.layers.1.mlp", "/etc/passwd"],
    ),
    "weights on a drive": (
        [altered("block_2.onnx", lambda model: externalised(model, "C:\\weights.data"))],
        ["block_2.onnx", "model.layers.1.mlp", "none in the folder"],
    ),
    "weights behind a link": (
        [linked_out, altered("block_2.onnx", lambda model: externalised(model, "link.data"))],
        ["block_2.onnx", "model.layers.1.mlp", "'link.data' is a link out of the folder"],
    ),
    "weights that are missing": (
        [altered("block_2.onnx", lambda model: externalised(model, "none.data"))],
        ["block_2.onnx", "model.layers.1.mlp", "'none.data' is missing"],
    ),
    "a pointer of Git LFS in a block's place": (
        [overwritten("block_2.onnx", POINTER)],
        ["block_2.onnx", "git lfs pull"],
    ),
    "weights in a folder's place": (
        [altered("block_2.onnx", lambda model: externalised(model, "."))],
        ["block_2.onnx", "not a plain file"],
    ),
    "an input that is no tensor": ([altered("block_2.onnx", sequence_input)], ["block_2.onnx", "several", "sequence"]),
    "an input of another type": (
        [altered("block_2.onnx", lambda model: retyped(model, MASK, TensorProto.BFLOAT16))],
        ["block_2.onnx", MASK, "bfloat16"],
    ),
    "a negative dimension": ([altered("block_2.onnx", negative)], ["block_2.onnx", HIDDEN, "dimension of -2"]),
}


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> str:
    """What stderr says: one line. Nothing else is said, and the folder is as it was."""
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} if folder.is_dir() else {}
    arguments = ["--device", "cpu", "--batch", "2", "--sequence", "3", "--past", "0", *options, "--", str(folder)]
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    assert before == ({path.name: path.stat().st_mtime_ns for path in folder.iterdir()} if folder.is_dir() else {})
    return err


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_named(blocks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    changes, words = REFUSED[case]
    folder = copied(blocks, tmp_path / "copy", *changes)
    started = time.monotonic()
    said = refused(capsys, folder, "--write", str(tmp_path / "blocks.json"))
    assert time.monotonic() - started < 10
    for word in words:
        assert word in said
    assert not (tmp_path / "blocks.json").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (cut("block_3.onnx.data", 0.5), "cut off"),
        (overwritten("block_3.onnx.data", POINTER), "lies in block_3.onnx.data, which is a Git LFS pointer"),
    ],
    ids=["cut off", "left out by git"],
)
def test_weights_beside_the_graph_that_are_not_whole(
    with_weights_beside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Change, words: str
) -> None:
    said = refused(capsys, copied(with_weights_beside, tmp_path / "copy", change))
    assert "block_3.onnx: model.layers.2." in said and words in said


def test_weights_beside_the_graph_that_were_altered(
    with_weights_beside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(with_weights_beside, tmp_path / "copy")
    listing = tmp_path / "listing.json"
    listing.write_text(encode_blocks_file(open_onnx_folder(folder).facts()))
    data = folder / "block_3.onnx.data"
    data.write_bytes(bytes([data.read_bytes()[0] ^ 1]) + data.read_bytes()[1:])
    assert "block_3.onnx.data: altered" in refused(capsys, folder, "--against", str(listing))


def test_folders_that_have_no_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no such folder" in refused(capsys, tmp_path / "nothing")
    assert "has no ONNX files" in refused(capsys, tmp_path)
    (tmp_path / "._block_1.onnx").write_bytes(b"of another file system")
    assert "has no ONNX files" in refused(capsys, tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    assert "is a block folder of Blockrelay" in refused(capsys, tmp_path)


def test_devices_and_places_that_are_not_there(
    blocks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "'abacus:0' is not a device of ONNX Runtime" in refused(capsys, blocks, "--device", "abacus:0")
    assert "there is no folder" in refused(capsys, blocks, "--write", str(tmp_path / "none" / "blocks.json"))
    precious = tmp_path / "precious.onnx"
    precious.write_bytes(b"weights")
    assert "would overwrite what is no blocks.json" in refused(capsys, blocks, "--write", str(precious))
    assert precious.read_bytes() == b"weights"


def test_bytes_that_mean_nothing_are_refused_in_one_line(tmp_path: Path) -> None:
    """Or read: then they are for ONNX Runtime to refuse."""
    tiny = ReferenceModel(layers=1, hidden=4, heads=2, kv_heads=1, head_dim=2, mlp=4, vocabulary=8)
    seeds = [reference_block(tiny, index).SerializeToString() for index in (1, 2)]
    dice = random.Random(5)
    refusals = 0
    for _ in range(600):
        content = bytearray(dice.choice(seeds))
        for _ in range(dice.choice((1, 1, 3))):
            place = dice.randrange(len(content))
            content[place : place + dice.randrange(3)] = dice.randbytes(dice.randrange(3))
        (tmp_path / "block_1.onnx").write_bytes(content)
        try:
            wire([read_onnx_file(tmp_path, "block_1.onnx", 1).signature])
        except OnnxBlocksError as error:
            refusals += 1
            assert str(error).isprintable() and "block_1.onnx" in str(error)
    assert refusals > 100

"""Each block alone: what it declares beside what it gave, and why one did not pass."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from blockrelay.onnx_blocks.blocks_file import read_blocks_file
from blockrelay.onnx_blocks.dimensions import StepSizes
from blockrelay.onnx_blocks.reports.checking import CheckBegins, CheckedBlock
from blockrelay.onnx_blocks.reports.codec import decode
from blockrelay.onnx_blocks.signature import Tensor
from blockrelay.onnx_blocks.wiring import FromRequest
from blockrelay_worker.execution.onnx.as_is.made_up import made_up
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider
from blockrelay_worker.offline.onnx_blocks.check import run
from blockrelay_worker.offline.onnx_blocks.folder import open_onnx_folder
from blockrelay_worker.offline.onnx_blocks.trial import check_blocks
from tests.support.models.altered_blocks import altered, copied, masked_by_infinity, resized, spoils, value

pytestmark = pytest.mark.onnx_blocks

#: That of the reference check.
SIZES = StepSizes(batch=5, new=10, past=0)


def checked(folder: Path, sizes: StepSizes = SIZES) -> list[CheckedBlock]:
    return list(check_blocks(open_onnx_folder(folder), CpuProvider(), sizes))


def shapes(block: CheckedBlock) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tuple(tensor.shape or ()) for tensor in block.outputs}


@pytest.mark.parametrize("kind", ["blocks", "with_weights_beside"])
def test_the_reference_check(kind: str, request: pytest.FixtureRequest) -> None:
    first, *layers, head = checked(request.getfixturevalue(kind))
    assert shapes(first) == {
        "/model/ScatterND_output_0": (5, 1, 10, 10),
        "/model/layers.0/Add_1_output_0": (5, 10, 64),
        "/model/layers.0/self_attn/Unsqueeze_6_output_0": (5, 1, 10, 16),
        "/model/layers.0/self_attn/Unsqueeze_7_output_0": (5, 1, 10, 16),
        "present.0.key": (5, 2, 10, 16),
        "present.0.value": (5, 2, 10, 16),
    }
    assert [one.block for one in layers] == ["block_2", "block_3"]
    assert shapes(layers[1])["present.2.value"] == (5, 2, 10, 16)
    assert shapes(head) == {"logits": (5, 10, 512)}
    for block in (first, *layers, head):
        assert block.passed and block.seconds is not None and block.load_seconds is not None
        assert {tensor.dtype for tensor in block.outputs} == {"float16"}


def test_a_past_makes_presents_and_masks_longer(blocks: Path) -> None:
    first, second, *_ = checked(blocks, StepSizes(batch=2, new=1, past=3))
    assert first.passed and second.passed
    assert shapes(first)["/model/ScatterND_output_0"] == (2, 1, 1, 4)
    assert shapes(second)["present.1.key"] == (2, 2, 4, 16)
    assert {tensor.name: tensor.shape for tensor in second.inputs}["past_key_values.1.key"] == (2, 2, 3, 16)


def nameless(model: ModelProto) -> None:
    """Every dimension that has a name has one that says nothing, as tools leave them behind."""
    for index, one in enumerate((*model.graph.input, *model.graph.output)):
        for axis, dim in enumerate(one.type.tensor_type.shape.dim):
            if dim.dim_param:
                dim.dim_param = f"unk__{index}_{axis}" if axis else ""


def test_without_names_dimensions_follow_from_places(blocks: Path, tmp_path: Path) -> None:
    names = [f"block_{index}.onnx" for index in range(1, 5)]
    folder = copied(blocks, tmp_path / "copy", *(altered(name, nameless) for name in names))
    found = checked(folder, StepSizes(batch=2, new=3, past=4))
    assert [one.problem for one in found] == [""] * 4
    assert shapes(found[1])["present.1.key"] == (2, 2, 7, 16)


def fixed_batch(model: ModelProto) -> None:
    resized(model, "input_ids", 0, 1)


def wrong_width(model: ModelProto) -> None:
    resized(model, "logits", 2, 513)


def fails_when_run(model: ModelProto) -> None:
    """A product that does not fit, behind a shape that nobody knows before."""
    (product,) = (node for node in model.graph.node if node.name == "/lm_head/MatMul")
    shape = helper.make_tensor("bad_shape", TensorProto.INT64, [2], [7, -1])
    model.graph.initializer.append(shape)
    node = helper.make_node("Reshape", [product.input[0], "bad_shape"], ["reshaped"])
    position = list(model.graph.node).index(product)
    model.graph.node.insert(position, node)
    model.graph.node[position + 1].input[0] = "reshaped"


@pytest.mark.parametrize(
    ("name", "alter", "words"),
    [
        ("block_1.onnx", fixed_batch, ["input_ids", "(1, sequence_length)", "batch 5"]),
        ("block_4.onnx", wrong_width, ["logits", "(5, 10, 512)", "513"]),
        ("block_4.onnx", fails_when_run, ["Reshape"]),
    ],
)
def test_a_block_that_fails_says_why_and_the_others_go_on(
    blocks: Path, tmp_path: Path, name: str, alter: Callable[[ModelProto], None], words: list[str]
) -> None:
    found = checked(copied(blocks, tmp_path / "copy", altered(name, alter)))
    (failed,) = (one for one in found if not one.passed)
    assert failed.file == name and "\n" not in failed.problem
    for word in words:
        assert word in failed.problem, failed.problem
    assert len(found) == 4


def nan_for_everything(model: ModelProto) -> None:
    spoils(model, "/model/layers.2/Add_1_output_0")


def too_large(model: ModelProto) -> None:
    """Weights of which each is a float16, and whose products are none."""
    (matrix,) = (one for one in model.graph.initializer if one.name == "model.layers.2.mlp.down_proj.weight")
    weights = numpy_helper.to_array(matrix)
    matrix.CopyFrom(numpy_helper.from_array(np.full_like(weights, 60000), matrix.name))


@pytest.mark.parametrize(("alter", "count"), [(nan_for_everything, "3200 of 3200"), (too_large, "of 3200")])
def test_a_block_that_gives_what_is_no_number_does_not_pass(
    blocks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], alter: Callable[[ModelProto], None], count: str
) -> None:
    folder = copied(blocks, tmp_path / "copy", altered("block_3.onnx", alter))
    found = checked(folder)
    assert [one.passed for one in found] == [True, True, False, True]
    problem = found[2].problem
    assert problem.startswith("/model/layers.2/Add_1_output_0: ") and count in problem
    assert "numbers are NaN or infinite" in problem
    sizes = ["--batch", "5", "--sequence", "10", "--past", "0"]
    assert run(["--device", "cpu", *sizes, str(folder)]) == 1
    assert decode(CheckedBlock, capsys.readouterr().out.splitlines()[3].encode()).problem == problem


@pytest.mark.parametrize("sizes", [SIZES, StepSizes(batch=2, new=3, past=4), StepSizes(batch=1, new=1, past=0)])
def test_masks_of_minus_infinity_pass(blocks: Path, tmp_path: Path, sizes: StepSizes) -> None:
    folder = copied(blocks, tmp_path / "copy", altered("block_1.onnx", masked_by_infinity))
    assert [one.problem for one in checked(folder, sizes)] == [""] * 4


def counted(model: ModelProto) -> None:
    """Gives how many positions there are, and how many tokens: numbers that later blocks look up."""
    model.graph.node.append(helper.make_node("Shape", ["attention_mask"], ["lengths"]))
    model.graph.output.append(value("lengths", TensorProto.INT64, 2))


def uses_the_count(model: ModelProto) -> None:
    model.graph.input.append(value("lengths", TensorProto.INT64, 2))
    model.graph.node.append(helper.make_node("ConstantOfShape", ["lengths"], ["as_many"]))
    model.graph.output.append(value("as_many", TensorProto.FLOAT, "batch_size", "total_sequence_length"))


def test_integers_of_earlier_blocks_are_not_made_up(blocks: Path, tmp_path: Path) -> None:
    changes = altered("block_1.onnx", counted), altered("block_3.onnx", uses_the_count)
    found = checked(copied(blocks, tmp_path / "copy", *changes), StepSizes(batch=2, new=3, past=4))
    assert [one.problem for one in found] == [""] * 4
    assert shapes(found[2])["as_many"] == (2, 7)
    broken = altered("block_1.onnx", fixed_batch)
    found = checked(copied(blocks, tmp_path / "other", *changes, broken), StepSizes(batch=2, new=3, past=4))
    assert [one.passed for one in found] == [False, True, False, True]
    assert "lengths: is int64, which cannot be made up" in found[2].problem


def sessions() -> list[ort.InferenceSession]:
    return [one for one in gc.get_objects() if isinstance(one, ort.InferenceSession)]


def test_one_session_is_there_at_a_time(blocks: Path, tmp_path: Path) -> None:
    folder = copied(blocks, tmp_path / "copy", altered("block_4.onnx", fails_when_run))
    others = sessions()  # of fixtures of other tests
    for _ in check_blocks(open_onnx_folder(folder), CpuProvider(), SIZES):
        assert all(any(one is other for other in others) for one in sessions())


def test_inputs_are_the_same_every_time_and_mean_something() -> None:
    sizes = StepSizes(batch=2, new=3, past=4)

    def made(name: str, dtype: str, shape: tuple[int, ...], vocabulary: int | None = None) -> Any:
        tensor = Tensor(name, dtype, None)
        return made_up("f", tensor, FromRequest(), shape, sizes, vocabulary=vocabulary, given={})

    assert made("position_ids", "int64", (2, 3)).tolist() == [[4, 5, 6]] * 2
    assert made("attention_mask", "int32", (2, 7)).tolist() == [[1] * 7] * 2
    ids = made("input_ids", "int64", (2, 3), vocabulary=3)
    assert ids.max() < 3 and ids.min() >= 0 and ids.dtype == np.int64
    assert made("input_ids", "int64", (2, 30)).max() < 8, "no table: few tokens are safe"
    assert np.array_equal(ids, made("input_ids", "int64", (2, 3), vocabulary=3))


def test_the_vocabulary_is_that_of_the_table(blocks: Path) -> None:
    files = open_onnx_folder(blocks).files
    assert [file.vocabulary for file in files] == [512, None, None, None]


def arguments(folder: Path, *options: str) -> list[str]:
    return ["--device", "cpu", "--batch", "5", "--sequence", "10", "--past", "0", *options, "--", str(folder)]


def test_the_lines_that_it_prints_and_the_file_that_it_writes(
    blocks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in blocks.iterdir())
    listing = tmp_path / "blocks.json"
    assert run(arguments(blocks, "--write", str(listing))) == 0
    begin, *lines = capsys.readouterr().out.encode().splitlines()
    assert [block for block, _ in decode(CheckBegins, begin).blocks] == ["block_1", "block_2", "block_3", "block_4"]
    assert all(decode(CheckedBlock, line).passed for line in lines) and len(lines) == 4
    assert read_blocks_file(listing) == open_onnx_folder(blocks).facts()
    assert sorted(path.name for path in blocks.iterdir()) == before
    assert run(arguments(blocks, "--against", str(listing), "--write", str(listing))) == 0, "it may be written again"


def test_a_block_that_failed_is_exit_code_1_and_nothing_is_written(
    blocks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(blocks, tmp_path / "copy", altered("block_4.onnx", wrong_width))
    assert run(arguments(folder, "--write", str(tmp_path / "blocks.json"))) == 1
    out, err = capsys.readouterr()
    assert [decode(CheckedBlock, line).passed for line in out.encode().splitlines()[1:]] == [True, True, True, False]
    assert not err and not (tmp_path / "blocks.json").exists()

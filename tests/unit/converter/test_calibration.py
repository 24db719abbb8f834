"""Calibration: what it folds changes nothing, and what it is for shows in the logits."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.block_folder.model import Precision, is_exact
from blockrelay.errors import UsageError
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_converter.convert import convert
from blockrelay_converter.quantisation.calibration import sequences
from blockrelay_converter.quantisation.calibration_record import REPORT_NAME, report_table
from blockrelay_converter.quantisation.groups import group_values, quantise_groups
from blockrelay_converter.quantisation.smoothing import exponents_for, smooth
from blockrelay_converter.quantisation.smoothing_scales import Smoothing, channels_of, layer_smoothing
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.cpu.loading import load_stage
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.kernels import load_kernels
from tests.support.models.checkpoints import Family, write_checkpoint
from tests.support.models.planted_outliers import plant_outliers, read_float32

pytestmark = pytest.mark.thorough

TEXT = " ".join(f"Tom has {n} apples and a red ball; the dog is in the garden, behind tree {n * 7}." for n in range(90))
PROBE = "Every evening the keeper climbed the stairs and lit the lamp. Anna gives the ball to Tom." * 3


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


def converted(checkpoint: Path, out: Path, precision: Precision = "w8a8", text: Path | None = None) -> Manifest:
    return convert(
        checkpoint,
        out,
        precision=precision,
        report=lambda *_: None,
        name="tiny",
        calibration_text=text,
        answers=is_exact(precision),
        basis="original",  # a rotation spreads outliers of the residual stream, and leaves smoothing little to do
    )


def logits_of(folder: BlockFolder, text: str = PROBE) -> NDArray[np.float32]:
    """Returns the logits [tokens, vocabulary] of a text, computed by the executor."""
    assert folder.tokenizer_path is not None
    ids = Tokenizer.from_file(folder.tokenizer_path).encode(text)
    blocks = folder.model.blocks
    executor = load_stage(folder, 1, blocks, pages=pages_for(len(ids)), threads=1, kernels=load_kernels(1))
    segment = Segment(rows=len(ids), first_position=0, pages=executor.pool.allocate(pages_for(len(ids))))
    output = executor.run(Batch(segments=[segment], tokens=np.array(ids, np.int32), wanted=range(len(ids))))
    assert output.logits is not None
    return output.logits.copy()


def relative_error(found: NDArray[np.float32], exact: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_outlier_channels_ruin_w8a8_and_calibration_mends_it(family: Family, text: Path, tmp_path: Path) -> None:
    # Given a model, and the same function with a few channels 100 times as large
    checkpoint = write_checkpoint(tmp_path / "c", seed=3, family=family)
    exact = logits_of(open_folder(checkpoint, tmp_path / "exact", "fp32"))
    clean = relative_error(logits_of(open_folder(checkpoint, tmp_path / "clean")), exact)
    plant_outliers(checkpoint, heads=4, kv_heads=2, factor=100)
    planted = logits_of(open_folder(checkpoint, tmp_path / "planted-fp32", "fp32"))
    assert relative_error(planted, exact) < 1e-3

    plain = relative_error(logits_of(open_folder(checkpoint, tmp_path / "plain")), exact)
    calibrated = relative_error(logits_of(open_folder(checkpoint, tmp_path / "calibrated", text=text)), exact)

    assert plain > 8 * clean
    assert calibrated < plain / 5
    assert calibrated < 1.5 * clean
    report = json.loads((tmp_path / "calibrated" / REPORT_NAME).read_bytes())
    for block, linears in report["relative_errors"].items():
        assert set(linears) == ({"head"} if block == "block_5" else {"qkv", "o", "gate_up", "down"})
        for name, one in linears.items():
            assert one["after"] < one["before"] / 4, (block, name)
            assert one["share"] is not None


def test_rows_in_groups_are_judged_by_a_scale_for_each() -> None:
    # Given inputs of which the first half is a hundred times larger, and weights that nothing rounds
    rng = np.random.default_rng(7)
    inputs = rng.standard_normal((50, 64)).astype(np.float32)
    inputs[:, :32] *= 100
    weights = rng.standard_normal((8, 64)).astype(np.float32)
    weights[:, :32] /= 100
    sizes = np.abs(inputs).max(axis=0).astype(np.float64), np.abs(weights).max(axis=0)
    one, two = (smooth(inputs, *sizes, np.arange(64), [weights], lambda rows: rows, group=group) for group in (0, 32))
    assert one.before > 0.1 and one.share is not None
    assert two.before < 0.01


def test_calibration_judges_4_bit_weights_as_they_are_rounded(text: Path, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=3)
    plant_outliers(checkpoint, heads=4, kv_heads=2, factor=100)
    exact = logits_of(open_folder(checkpoint, tmp_path / "exact", "fp32"))
    plain = relative_error(logits_of(open_folder(checkpoint, tmp_path / "plain", "w4a8")), exact)
    calibrated = relative_error(logits_of(open_folder(checkpoint, tmp_path / "out", "w4a8", text)), exact)
    assert calibrated < plain / 3
    report = json.loads((tmp_path / "out" / REPORT_NAME).read_bytes())["relative_errors"]
    # 4-bit weights leave a tenth
    assert 0.05 < report["block_1"]["down"]["after"] < 0.2
    assert 0.05 < report["block_5"]["head"]["after"] < 0.2


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_weights_make_up_for_each_others_rounding(family: Family, text: Path, tmp_path: Path) -> None:
    # Given a model without outliers, so that there is nothing to smooth, and a text that the calibration reads
    checkpoint, probe = write_checkpoint(tmp_path / "c", seed=3, family=family), TEXT[:1200]
    exact = logits_of(open_folder(checkpoint, tmp_path / "exact", "fp32"), probe)

    def error(precision: Precision, text: Path | None) -> float:
        folder = open_folder(checkpoint, tmp_path / f"{precision}-{text is not None}", precision, text)
        return relative_error(logits_of(folder, probe), exact)

    assert error("w4a8", text) < 0.7 * error("w4a8", None)
    assert error("w8a8", text) < 0.95 * error("w8a8", None)  # rounded rows are the larger part


def test_a_note_recommends_calibration_where_4_bits_round_weights_that_have_more(text: Path, tmp_path: Path) -> None:
    # Given a checkpoint of 4 bits, whose weights `w4a8` holds as they are, and the one that it was made of
    wide = write_checkpoint(tmp_path / "wide", seed=3)
    narrow = shutil.copytree(wide, tmp_path / "narrow")
    tensors = read_float32(narrow)
    grids = {name: group_values(*quantise_groups(w)) if w.ndim == 2 else w for name, w in tensors.items()}
    save_file({name: np.ascontiguousarray(w) for name, w in grids.items()}, narrow / "model.safetensors")

    def notes(checkpoint: Path, precision: Precision, text: Path | None = None) -> list[str]:
        found: list[str] = []
        out = tmp_path / "out"
        convert(
            checkpoint, out, precision=precision, report=lambda *_: None, force=True, answers=False, note=found.append,
            calibration_text=text,
        )  # fmt: skip
        return [note for note in found if "--calibrate" in note]

    assert len(notes(wide, "w4a8")) == 1
    assert notes(wide, "w4a8", text) == notes(wide, "w8a8") == notes(narrow, "w4a8") == []


def open_folder(checkpoint: Path, out: Path, precision: Precision = "w8a8", text: Path | None = None) -> BlockFolder:
    converted(checkpoint, out, precision, text)
    return open_block_folder(out)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_float_pass_of_the_converter_computes_what_the_executor_does(family: Family, tmp_path: Path) -> None:
    from blockrelay_converter.block_writer import BlockSource
    from blockrelay_converter.checkpoint.safetensors import Checkpoint
    from blockrelay_converter.quantisation.float_model import FloatModel
    from blockrelay_converter.weight_source import F64

    checkpoint = write_checkpoint(tmp_path / "c", seed=5, family=family)
    folder = open_folder(checkpoint, tmp_path / "fp32", "fp32")
    assert folder.tokenizer_path is not None
    ids = np.array(Tokenizer.from_file(folder.tokenizer_path).encode(PROBE))
    cos, sin = folder.rotary()
    source = BlockSource(Checkpoint(checkpoint), folder.model, ("w8a8",) * folder.model.blocks, tied=False)
    model = FloatModel(source, cos[: ids.size], sin[: ids.size])
    x = model.embed(np.concatenate([ids, ids]))  # two sequences, which must not see each other
    for index in range(1, folder.model.layers + 1):
        model.layer(x, index, lambda linear, inputs: None)
    rows: list[F64] = []
    model.head(x, lambda linear, inputs: rows.append(inputs))
    first, second = np.split(rows[0] @ source.whole(folder.model.blocks, "head").T, 2)
    np.testing.assert_allclose(first, second, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(first, logits_of(folder), rtol=2e-4, atol=2e-4)


def test_the_folder_depends_on_checkpoint_and_text_and_not_on_threads(text: Path, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=1, family="qwen2")
    plant_outliers(checkpoint, heads=4, kv_heads=2, factor=30)
    for number, environment in enumerate(({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "7"})):
        command = [sys.executable, "-m", "blockrelay_converter", str(checkpoint), str(tmp_path / str(number))]
        done = subprocess.run(
            [*command, "--calibrate", str(text)],
            env=os.environ | {"OPENBLAS_NUM_THREADS": environment["OMP_NUM_THREADS"]} | environment,
            check=True,
            capture_output=True,
            text=True,
        )
        assert "block_4" in done.stdout
    first, second = ((tmp_path / number / "manifest.json").read_bytes() for number in "01")
    assert first == second
    assert converted(checkpoint, tmp_path / "other").model_hash != open_block_folder(tmp_path / "0").manifest.model_hash


@pytest.mark.parametrize(
    ("content", "precision", "options", "complaint"),
    [
        (None, "w8a8", {}, "cannot be read: No such file"),
        (b"", "w8a8", {}, "is empty"),
        (b"\xff", "w8a8", {}, "is not UTF-8"),
        (b"word", "w8a8", {}, "tokens of text are too few"),
        (TEXT[:3000].encode(), "w4a8", {}, "tokens of text are too few; 2048 are the least"),
        (TEXT.encode(), "fp32", {}, "--calibrate is for --precision w8a8 and w4a8"),
        (TEXT.encode(), "w8a8", {"tokenizer": False}, "needs a tokenizer.json"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_and_leaves_nothing(
    content: bytes | None, precision: Precision, options: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=1, **options)
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    with pytest.raises(UsageError, match=complaint):
        converted(checkpoint, tmp_path / "out", precision, tmp_path / "text")
    assert not (tmp_path / "out").exists()


def test_a_context_of_one_token_cannot_be_calibrated(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, seed=1)
    with pytest.raises(UsageError, match=r"a context of 1 token\(s\) leaves no room"):
        sequences(Tokenizer.from_file(tmp_path / "tokenizer.json"), TEXT, context=1)


def test_pieces_of_a_text_are_spread_over_it_and_begin_as_a_prompt_does(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, seed=1)
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json")
    plain = tokenizer.encode(TEXT, add_special_tokens=False)
    found = sequences(tokenizer, TEXT, context=64)
    assert found.shape == (32, 64)
    assert set(found[:, 0].tolist()) == {1}  # <s>
    assert found[0, 1:].tolist() == plain[:63]
    assert found[-1, 1:].tolist() == plain[-63:]
    assert sequences(tokenizer, TEXT, context=4096).shape == (4, 512)


def test_exponents_follow_inputs_and_spare_what_nobody_reads() -> None:
    inputs, weights = np.array([1.0, 64.0, 1.0, 0.0, 4.0]), np.array([1.0, 1.0, 1.0, 1.0, 0.0])
    assert exponents_for(inputs, weights, 1.0).tolist() == [0, 6, 0, 0, 0]
    assert exponents_for(inputs, weights, 0.5).tolist() == [0, 3, 0, 0, 0]
    assert exponents_for(np.array([1.0, 2.0**40]), np.array([1.0, 1.0]), 1.0).tolist() == [-12, 12]


def test_query_heads_of_a_group_share_the_channels_of_their_values(tmp_path: Path) -> None:
    model = converted(write_checkpoint(tmp_path / "c", seed=1), tmp_path / "out").model
    assert channels_of(model, "o").tolist() == [*range(16), *range(16), *range(16, 32), *range(16, 32)]
    exponents = {"o": np.arange(32, dtype=np.int32)}
    folding = layer_smoothing(model, exponents)
    assert folding.rows["qkv"].tolist() == [0] * 96 + [-n for n in range(32)]
    folded = folding.apply("o", slice(0, 2), np.ones((2, 64), np.float32))
    assert folded[1, 63] == 2.0**31
    values = np.ones((2, 64), np.float32)
    assert Smoothing().apply("o", slice(0, 2), values) is values


def test_the_report_becomes_a_table() -> None:
    one = {"before": 0.02, "after": 0.01, "share": 0.5}
    report = {
        "relative_errors": {"block_1": {"qkv": one, "o": one, "gate_up": one, "down": one}, "block_2": {"head": one}}
    }
    heading, first, last = report_table(json.dumps(report).encode())
    assert heading == ("block", "qkv", "o", "gate_up", "down", "head")
    assert first == ("block_1", *["0.0200 > 0.0100"] * 4, "")
    assert last == ("block_2", "", "", "", "", "0.0200 > 0.0100")

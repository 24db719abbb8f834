"""Reference logits are those of the undisturbed model, and distances from them say what is right and what is not."""

import base64
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.block_folder.model import Precision
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_worker.offline.pipeline import Pipeline
from blockrelay_worker.offline.reference_logits.__main__ import GROUP_TOKENS, groups, main
from blockrelay_worker.offline.reference_logits.distances import (
    FEW_BITS,
    FLOAT16,
    FLOAT32,
    LOGITS_OF_A_LENGTH,
    Tolerance,
    apart,
    behind_best,
    tolerance_of,
)
from blockrelay_worker.offline.reference_logits.models import CHUNK_ROWS, OnnxFiles, OwnKernels
from tests.support.models.genai_decoder import genai_decoder
from tests.support.models.onnx_blocks_served import described, opened
from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks
from tests.support.models.run_onnx import blocks
from tests.support.models.whole_decoders import SMALL

MODEL = ReferenceModel(layers=3)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return write_reference_blocks(tmp_path / "blocks", MODEL)


def test_a_token_is_behind_by_a_part_of_the_length_of_its_row() -> None:
    rows = np.array([[3.0, 4.0, 0.0]] * 4 + [[3.0, math.nan, 0.0]])
    found = behind_best(rows, [1, 0, 3, -1, 0])
    assert found[:4] == [0.0, 0.2, math.inf, math.inf] and math.isnan(found[4])


def test_what_a_request_changed_decides_about_the_best_token_and_not_about_the_length() -> None:
    rows = np.array([[3.0, 4.0, 0.0]] * 2)
    found = behind_best(rows, [0, 1], np.array([[3.0, 2.0, -math.inf], [3.0, -math.inf, 0.0]]))
    assert found == [0.0, math.inf]
    assert behind_best(rows, [2, 1], np.array([[3.0, 2.0, 1.0]] * 2)) == pytest.approx([0.4, 0.2])


def test_a_token_of_a_large_vocabulary_is_measured_by_what_few_logits_have() -> None:
    few, many = (np.tile([1.0, -1.0], count // 2)[None] for count in (LOGITS_OF_A_LENGTH, 64 * LOGITS_OF_A_LENGTH))
    assert behind_best(few, [1]) == pytest.approx(behind_best(many, [1]))


def test_rows_are_apart_but_for_what_no_token_depends_on() -> None:
    right = np.array([[3.0, -4.0, 1.0], [0.0, 5.0, -5.0]])
    assert apart(right + 7, right) == pytest.approx([0.0, 0.0])
    assert apart(2 * right, right) == pytest.approx([1.0, 1.0])
    assert all(map(math.isnan, apart(right[:, :2], right)))


@pytest.mark.parametrize(
    ("precisions", "packed", "tolerance"),
    [
        (("fp32", "fp32"), False, FLOAT32),
        (("fp32", "fp16"), False, FLOAT16),
        (("fp16",), True, FEW_BITS),
        (("w8a8", "fp32"), False, FEW_BITS),
    ],
)
def test_a_model_is_as_close_as_its_bits(precisions: Sequence[Precision], packed: bool, tolerance: Tolerance) -> None:
    assert tolerance_of(precisions, packed=packed) == tolerance


def test_files_of_others_run_one_after_the_other_as_they_do_by_themselves(raw: Path, tmp_path: Path) -> None:
    model = OnnxFiles(opened(raw, tmp_path / "cache"))
    sequences = [[5, 6, 7, 8, 9], [11]]
    assert model.tolerance == FLOAT16
    for tokens, rows in zip(sequences, model.rows(sequences), strict=True):
        alone = blocks(raw)
        right = [
            alone.step(
                {
                    "input_ids": np.array([[token]]),
                    "attention_mask": np.ones((1, at + 1), np.int64),
                    "position_ids": np.array([[at]]),
                }
            )["logits"][0, 0]
            for at, token in enumerate(tokens)
        ]
        assert rows.shape == (len(tokens), MODEL.vocabulary) and max(apart(rows, np.array(right))) < 0.005


def test_packed_weights_of_others_have_few_bits(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    folder.mkdir()
    decoder = genai_decoder(int4=True)
    for value in (*decoder.graph.input, *decoder.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "kv_cache_dim":  # which only a split fills in
                dim.dim_value = SMALL.head_dim
    onnx.save(decoder, folder / "block_1.onnx")
    model = OnnxFiles(opened(folder, tmp_path / "cache"))
    (rows,) = model.rows([[1, 2, 3]])
    assert model.tolerance == FEW_BITS and len(rows) == 3 and np.isfinite(rows).all()


def test_our_own_kernels_give_the_rows_of_one_token_at_a_time() -> None:
    folder = open_block_folder(BUNDLED_MODEL)
    tokens = [3 + 7 * n % 2000 for n in range(CHUNK_ROWS + 2)]
    (rows,) = OwnKernels(folder).rows([tokens])
    alone = Pipeline(folder, stages=1, threads=1, tokens=len(tokens))
    for at, token in enumerate(tokens):
        assert np.array_equal(rows[at], alone.run([token], at)[0]), at


def test_the_command_says_how_far_answers_are_off(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = described(raw, tmp_path / "cache")
    prompt = [5, 6, 7]
    (rows,) = OnnxFiles(open_block_folder(folder)).rows([prompt])
    best = int(rows[2].argmax())
    (after,) = OnnxFiles(open_block_folder(folder)).rows([[*prompt, best]])
    worst = int(after[3].argmin())
    logits = [base64.b64encode(rows[at].astype("<f2").tobytes()).decode() for at in (0, 0)]
    asked = [{"prompt": prompt, "answer": [best, worst]}, {"prompt": prompt, "cuts": [1, 3], "logits": logits}]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(json.dumps(one) + "\n" for one in asked)))
    main(str(folder))
    told, answer, session = map(json.loads, capsys.readouterr().out.splitlines())
    assert told == {"tolerance": {"token": 0.02, "row": 0.02}}
    assert answer["off"][0] == 0.0 and answer["off"][1] > 0.1
    assert session["off"][0] < 0.001 and session["off"][1] > 0.1


def test_all_that_is_asked_comes_in_groups_that_fit() -> None:
    asked = [{"prompt": [1] * count, "answer": [2]} for count in (1, GROUP_TOKENS, 5, GROUP_TOKENS - 5, 1)]
    found = list(groups(asked))
    assert [one for group in found for one in group] == asked and [len(group) for group in found] == [1, 1, 2, 1]
    assert list(groups([])) == []

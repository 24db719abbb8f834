"""A model whose residual stream is rotated computes what the original one computes."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.block_folder.manifest import Basis
from blockrelay.block_folder.precisions import parse_precisions
from blockrelay.errors import BlockFolderError
from blockrelay_converter.convert import basis_of, convert
from blockrelay_converter.mixing.linked_folder import link_mix
from blockrelay_converter.quantisation.hadamard import transform
from blockrelay_converter.quantisation.rotated_weights import rotate
from tests.support.models.checkpoints import Family, write_checkpoint
from tests.support.models.hadamard import hadamard
from tests.support.worker.float64_oracle import oracle_logits


def converted(checkpoint: Path, out: Path, precision: str, basis: Basis) -> BlockFolder:
    convert(checkpoint, out, precision=precision, report=lambda *_: None, name="tiny", answers=False, basis=basis)
    return open_block_folder(out, known_answers=False)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_rotated_model_predicts_what_the_original_one_predicts(family: Family, tied: bool, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=3, family=family, tie_word_embeddings=tied)
    original = converted(checkpoint, tmp_path / "original", "fp32", "original")
    rotated = converted(checkpoint, tmp_path / "rotated", "fp32", "rotated")

    assert (original.manifest.basis, rotated.manifest.basis) == ("original", "rotated")
    assert np.abs(rotated.tensors(1)["embedding"] - original.tensors(1)["embedding"]).max() > 0.01
    assert (rotated.tensors(2)["norm_mlp"] == 1).all() and (rotated.tensors(5)["norm_final"] == 1).all()
    tokens = [1, 60, 7, 8, 250, 3, 3]
    expected = oracle_logits(original, tokens)
    np.testing.assert_allclose(oracle_logits(rotated, tokens), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "original", "rotated"]


@pytest.mark.parametrize("width", [1, 16, 24, 96, 576])
def test_a_rotation_is_orthogonal_and_spreads_every_channel(width: int) -> None:
    rotation = rotate(np.eye(width, dtype=np.float32)).astype(np.float64)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(width), rtol=0, atol=1e-5)
    # A channel that is far larger than the others ends up on all of them: none takes more than its share five times.
    assert np.abs(rotation).max() <= 5 / np.sqrt(width)


def test_a_rotation_is_the_same_on_every_machine() -> None:
    columns = (np.arange(96 * 5, dtype=np.float32).reshape(96, 5) - 200) / np.float32(64)
    assert hashlib.sha256(rotate(columns).tobytes()).hexdigest()[:16] == "11b1640155b500d4"


@pytest.mark.parametrize(("size", "blocks"), [(1, 3), (2, 1), (16, 3), (512, 2)])
def test_butterflies_multiply_by_a_hadamard_matrix(size: int, blocks: int) -> None:
    values = np.random.default_rng(0).standard_normal((size * blocks, 7), np.float32)
    expected = hadamard(size) @ values.reshape(blocks, size, 7).astype(np.float64)
    transform(values, size)
    np.testing.assert_allclose(values, expected.reshape(values.shape), rtol=0, atol=1e-4)


def test_models_with_most_layers_in_8_bits_are_rotated_and_those_of_4_bits_or_floats_are_not() -> None:
    rotated = ["w8a8", "w8a8,block_1=w4a8", "w8a8,block_4=w4a8"]
    original = ["w4a8", "w4a8,block_4=w8a8", "w4a8,block_1=w8a8", "fp16", "w8a8,block_3=fp32"]
    assert [text for text in rotated + original if basis_of(parse_precisions(text, 4)) == "rotated"] == rotated


def test_blocks_in_two_bases_do_not_mix(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=3)
    parts = [
        converted(checkpoint, tmp_path / "eight", "w8a8", "rotated"),
        converted(checkpoint, tmp_path / "four", "w4a8", "original"),
    ]
    (tmp_path / "mix").mkdir()
    with pytest.raises(BlockFolderError, match="two bases, original and rotated"):
        link_mix(parts, parse_precisions("w8a8,block_1=w4a8", 5), tmp_path / "mix")

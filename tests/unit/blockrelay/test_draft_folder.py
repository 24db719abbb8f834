"""Which folders may draft for a model: those whose token ids mean the same."""

import json
from pathlib import Path

import pytest

from blockrelay.block_folder.draft_folder import open_draft
from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.errors import BlockFolderError, UsageError
from blockrelay_converter.convert import convert
from tests.support.models.checkpoints import write_checkpoint


def a_model(root: Path, *, precision: str = "w8a8", other_words: bool = False, **checkpoint: int) -> BlockFolder:
    write_checkpoint(root / "checkpoint", seed=4, num_hidden_layers=1, **checkpoint)  # pyright: ignore[reportArgumentType]
    if other_words:
        file = root / "checkpoint/tokenizer.json"
        words = json.loads(file.read_text())
        ids = words["model"]["vocab"]
        ids["a"], ids["b"] = ids["b"], ids["a"]
        file.write_text(json.dumps(words))
    convert(root / "checkpoint", root / "model", precision=precision, report=lambda what, done, total: None)
    return open_block_folder(root / "model")


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> BlockFolder:
    return open_block_folder(tiny_model)


def test_a_smaller_model_of_the_same_tokenizer_drafts_in_any_precision(served: BlockFolder, tmp_path: Path) -> None:
    for precision in ("w8a8", "fp32"):
        smaller = a_model(tmp_path / precision, precision=precision, hidden_size=32, max_position_embeddings=64)
        assert open_draft(smaller.root, served).model_key == smaller.model_key


def test_another_vocabulary_or_tokenizer_is_refused(served: BlockFolder, tmp_path: Path) -> None:
    larger = a_model(tmp_path / "larger", vocab_size=520)
    with pytest.raises(UsageError, match="its vocabulary has 520 tokens, not 512"):
        open_draft(larger.root, served)
    swapped = a_model(tmp_path / "swapped", other_words=True)
    with pytest.raises(UsageError, match="it has another tokenizer"):
        open_draft(swapped.root, served)


def test_a_model_whose_precision_is_not_exact_takes_no_drafts(served: BlockFolder, tmp_path: Path) -> None:
    floats = a_model(tmp_path, precision="fp32")
    with pytest.raises(UsageError, match="no tokens are guessed for the precision fp32"):
        open_draft(served.root, floats)


def test_what_is_no_block_folder_is_named(served: BlockFolder, tmp_path: Path) -> None:
    with pytest.raises(BlockFolderError, match="nowhere"):
        open_draft(tmp_path / "nowhere", served)

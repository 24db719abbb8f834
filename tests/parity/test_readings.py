"""What a checkpoint says is read as transformers reads it. Its readings are committed: no transformers here."""

from pathlib import Path

import pytest

from blockrelay.text.text_assets import read_texts
from tests.parity.reading_cases import TOKENS, readings, write_folder


@pytest.mark.parametrize("name", TOKENS)
def test_special_tokens_are_named_as_transformers_names_them(name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", TOKENS[name])
    texts = read_texts(folder, vocab_size=400, eos_ids=None, bos_id=None)
    assert {"bos_token": texts.bos_token, "eos_token": texts.eos_token} == readings()["tokens"][name]

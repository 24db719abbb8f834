"""What a checkpoint says is read as transformers reads it. Its readings are committed: no transformers here."""

import json
from pathlib import Path

import pytest

from blockrelay.text.text_assets import read_texts
from blockrelay_converter.checkpoint.config import read_config
from tests.support.models.reading_cases import CONFIGS, TOKENS, readings, write_folder


@pytest.mark.parametrize("name", TOKENS)
def test_special_tokens_are_named_as_transformers_names_them(name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", TOKENS[name])
    texts = read_texts(folder, vocab_size=400, eos_ids=None, bos_id=None)
    assert {"bos_token": texts.bos_token, "eos_token": texts.eos_token} == readings()["tokens"][name]


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_config_leaves_out_is_what_transformers_computes_with(name: str) -> None:
    config = read_config(json.dumps({"sliding_window": None, **CONFIGS[name]}).encode())
    assert readings()["configs"][name] == {
        "kv_heads": config.model.kv_heads,
        "head_dim": config.model.head_dim,
        "rms_norm_eps": config.model.rms_norm_eps,
        "tied": config.tied,
        "theta": config.rotary.theta,
    }

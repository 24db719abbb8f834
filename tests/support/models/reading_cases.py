"""Checkpoints of which little is written down, and what transformers makes of it (readings.json).

`python -m tests.parity.make_readings` makes the file, in the environment of `make parity-goldens`.
"""

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

from tests.support.models.checkpoints import write_tokenizer

READINGS = Path(__file__).parents[2] / "parity" / "readings.json"
Files: TypeAlias = Mapping[str, Mapping[str, Any]]

_OBJECT = {"content": "<s>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
_CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}  # has no special tokens of its own
_SETTINGS: Mapping[str, dict[str, Any]] = {
    "nothing": {},
    "names": {"bos_token": "<s>", "eos_token": "</s>"},
    "object": {"bos_token": {"__type": "AddedToken", **_OBJECT}, "eos_token": None},
    "listed": {"added_tokens_decoder": {"1": {**_OBJECT, "special": True}}},
    "listed-names": {"added_tokens_decoder": {}, "eos_token": "</s>"},
}
_OLDER: Mapping[str, dict[str, Any]] = {
    "names": {"bos_token": "<s>", "eos_token": "</s>"},
    "other": {"bos_token": "<unk>", "eos_token": _OBJECT},
    "null": {"bos_token": None},
}
#: Folders with a tokenizer, by the files that name its special tokens.
TOKENS: Mapping[str, Files] = {
    **{f"{name}-alone": {"tokenizer_config": _CLASS | given} for name, given in _SETTINGS.items()},
    **{
        f"{name}-and-{other}": {"tokenizer_config": _CLASS | given, "special_tokens_map": older}
        for (name, given), (other, older) in product(_SETTINGS.items(), _OLDER.items())
    },
}

_SIZES = {
    "hidden_size": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "intermediate_size": 64,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
_SAID: Mapping[str, dict[str, Any]] = {
    "bare": {},
    "null": {"num_key_value_heads": None},
    "said": {"num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
}
#: config.json, by family and by what it says.
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    f"{family}-{name}": {"model_type": family, **_SIZES, **given}
    for family, (name, given) in product(("llama", "mistral", "qwen2", "qwen3"), _SAID.items())
    if (family, name) != ("mistral", "null")  # which transformers refuses
}


def write_folder(folder: Path, files: Files) -> Path:
    """A tokenizer and those files."""
    folder.mkdir(parents=True)
    write_tokenizer(folder, vocab_size=400)
    (folder / "tokenizer_config.json").unlink()
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def readings() -> dict[str, dict[str, Any]]:
    """What transformers read: `tokens` and `configs`, each by the case's name."""
    return json.loads(READINGS.read_text())

"""The models whose greedy tokens are compared with transformers: every family, storage type, spelling and odd sizes.

A case is the arguments of `write_checkpoint` and a prompt; the checkpoint is made anew, bit for bit, where needed.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.models.checkpoints import write_checkpoint

NEW_TOKENS = 64
GOLDENS = Path(__file__).parents[2] / "parity" / "goldens.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`checkpoint` are arguments of `write_checkpoint`. The prompt is random ids; its length in tokens."""

    name: str
    checkpoint: dict[str, Any]
    prompt_length: int

    def write(self, path: Path) -> Path:
        """Write the checkpoint to `path` and return it."""
        return write_checkpoint(path, tokenizer=False, **self.checkpoint)

    def prompt(self) -> list[int]:
        """Token ids, the first one BOS."""
        raw = np.random.PCG64(self.checkpoint["seed"] + 1000).random_raw(self.prompt_length - 1)
        return [1, *(int(value % np.uint64(self.checkpoint.get("vocab_size", 512) - 3)) + 3 for value in raw)]


def checkpoint_sha256(path: Path) -> str:
    """SHA-256 over the names and bytes of all files of a checkpoint: tells a changed recipe from a wrong result."""
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def goldens() -> dict[str, Any]:
    """Case name -> {"sha256", "prompt", "tokens", "smallest_margin"}, as `make_goldens` wrote them."""
    return json.loads(GOLDENS.read_text())


_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # small enough for the scaled frequencies to matter within the prompt
}
_ODD = {
    "hidden_size": 102,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 201,
    "vocab_size": 1003,
}

CASES = (
    Case(name="llama-2", checkpoint={"seed": 201, "num_key_value_heads": 4, "dtype": "float16"}, prompt_length=21),
    Case(name="llama-3", checkpoint={"seed": 2, "rope_theta": 500000.0, "dtype": "bfloat16"}, prompt_length=3),
    Case(
        name="llama-3.1",
        checkpoint={
            "seed": 3,
            "rope_theta": 500000.0,
            "rope_scaling": _LLAMA3_SCALING,
            "dtype": "bfloat16",
            "shards": 3,
            "eos_ids": (2, 5, 7),
        },
        prompt_length=150,
    ),
    Case(
        name="llama-3.2",
        checkpoint={
            "seed": 4,
            "rope_scaling": _LLAMA3_SCALING,
            "tie_word_embeddings": True,
            "head_dim": 32,
            "dtype": "bfloat16",
            "new_spelling": True,
        },
        prompt_length=33,
    ),
    Case(
        name="llama-linear",
        checkpoint={"seed": 405, "rope_scaling": {"type": "linear", "factor": 4.0}, "dtype": "float16", "shards": 2},
        prompt_length=70,
    ),
    Case(
        name="llama-odd",
        checkpoint={"seed": 206, **_ODD, "tie_word_embeddings": True, "dtype": "bfloat16"},
        prompt_length=17,
    ),
    Case(
        name="mistral",
        checkpoint={
            "seed": 207,
            "family": "mistral",
            "num_attention_heads": 8,
            "head_dim": 32,
            "rope_theta": 1000000.0,
            "dtype": "bfloat16",
            "shards": 2,
            "config": {"sliding_window": 4096},
        },
        prompt_length=40,
    ),
    Case(
        name="qwen2",
        checkpoint={
            "seed": 3608,
            "family": "qwen2",
            "tie_word_embeddings": True,
            "rope_theta": 1000000.0,
            "dtype": "bfloat16",
            "config": {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 2},
        },
        prompt_length=31,
    ),
    Case(
        name="qwen2-odd",
        checkpoint={
            "seed": 9,
            "family": "qwen2",
            "hidden_size": 56,
            "num_hidden_layers": 3,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "intermediate_size": 150,
            "vocab_size": 1003,
            "new_spelling": True,
        },
        prompt_length=16,
    ),
    Case(
        name="qwen3",
        checkpoint={
            "seed": 610,
            "family": "qwen3",
            "head_dim": 32,
            "tie_word_embeddings": True,
            "rope_theta": 1000000.0,
            "dtype": "bfloat16",
            "new_spelling": True,
        },
        prompt_length=50,
    ),
    Case(name="qwen3-odd", checkpoint={"seed": 11, "family": "qwen3", **_ODD, "shards": 4}, prompt_length=5),
)

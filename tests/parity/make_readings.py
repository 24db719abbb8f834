"""Makes readings.json anew with transformers: `python -m tests.parity.make_readings`. Needs no torch.

With --check nothing is written; a difference from the committed file is an error.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.models.reading_cases import CONFIGS, READINGS, TOKENS, Files, readings, write_folder


def tokens(files: Files) -> dict[str, Any]:
    """How transformers' tokenizer of such a folder spells its special tokens."""
    from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]  (only `make parity` installs it)

    with tempfile.TemporaryDirectory() as root:
        folder = write_folder(Path(root) / "folder", files)
        (folder / "config.json").write_text('{"model_type": "llama"}')
        read = AutoTokenizer.from_pretrained(folder)
    return {"bos_token": read.bos_token, "eos_token": read.eos_token}


def config(given: dict[str, Any]) -> dict[str, Any]:
    """What transformers computes with where config.json does not say."""
    from transformers import AutoConfig  # pyright: ignore[reportMissingImports]

    read = AutoConfig.for_model(**given)
    return {
        "kv_heads": read.num_key_value_heads,
        "head_dim": read.head_dim if "head_dim" in read.to_dict() else read.hidden_size // read.num_attention_heads,
        "rms_norm_eps": read.rms_norm_eps,
        "tied": read.tie_word_embeddings,
        "theta": read.rope_parameters["rope_theta"],
    }


def main() -> int:
    """Write or check the readings. 1 on a difference with --check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the committed file instead of writing it")
    made = {
        "tokens": {name: tokens(files) for name, files in TOKENS.items()},
        "configs": {name: config(dict(given)) for name, given in CONFIGS.items()},
    }
    if not parser.parse_args().check:
        READINGS.write_text(json.dumps(made, indent=1) + "\n")
        return 0
    committed = readings()
    wrong = [name for kind in made for name in made[kind] if committed[kind].get(name) != made[kind][name]]
    for name in wrong:
        sys.stderr.write(f"{name}: differs from the committed reading\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

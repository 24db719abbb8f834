"""`python -m blockrelay_worker.solo MODEL < REQUESTS > ANSWERS`: what each request gives alone.

One JSON object per line, both ways: {"prompt": [ids], "params": SamplingParams.to_dict(), seed given} to {"tokens",
"text", "finish_reason"}; {"prompt", "cuts": [positions]} to {"digests"}, of the logits behind so many tokens. No
service, no batch mates, no page kept from one to the next, no guesses: everything else must give these answers.
"""

import hashlib
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from blockrelay.block_folder import open_block_folder
from blockrelay.sampling_params import SamplingParams
from blockrelay.tensors import to_float16
from blockrelay.text import Tokenizer, VisibleText
from blockrelay_worker.command_line import cores
from blockrelay_worker.generation import Pipeline, generate


def main(model: str) -> None:
    folder = open_block_folder(Path(model))
    tokenizer = Tokenizer.from_file(folder.tokenizer_path) if folder.tokenizer_path is not None else None
    pipeline = Pipeline(folder, stages=1, threads=cores(), tokens=folder.model.max_position)
    for line in sys.stdin:
        asked = json.loads(line)
        if "cuts" in asked:
            _answer({"digests": _digests(pipeline, asked["prompt"], asked["cuts"])})
            continue
        params = SamplingParams.from_dict(asked["params"])
        assert params.seed is not None, "without a seed there is nothing to compare"
        done = generate(pipeline, asked["prompt"], params, seed=params.seed, tokenizer=tokenizer)
        text = ""
        if tokenizer is not None:
            visible = VisibleText.of(tokenizer, params, folder.model.eos_ids)
            text = visible.push_all(done.tokens) + visible.finish()
        _answer({"tokens": done.tokens, "text": text, "finish_reason": done.finish_reason})


def _digests(pipeline: Pipeline, prompt: list[int], cuts: list[int]) -> list[str]:
    """SHA-256 of the float16 logits of the last of the first `cut` tokens, for each cut (ascending)."""
    found: list[str] = []
    for first, end in pairwise([0, *cuts]):
        row = pipeline.run(prompt[first:end], first, wanted=True, seconds={})
        assert row is not None
        found.append(hashlib.sha256(to_float16(row).astype("<f2").tobytes()).hexdigest())
    return found


def _answer(fields: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])

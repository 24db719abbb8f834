"""`python -m blockrelay_worker.offline.reference_answers MODEL < REQUESTS > ANSWERS`: what each request gives alone.

One JSON object per line, both ways: {"prompt": [ids], "params": SamplingParams.to_dict(), seed given} to {"tokens",
"text", "finish_reason"}; {"prompt", "cuts": [positions]} to {"digests"}, of the logits behind so many tokens. No
service, no batch mates, no page kept from one to the next, no guesses: everything else must give these answers.

"salts": [["", 17], ["x", null]] beside a prompt: the first 17 new tokens as a worker computes them, the rest as one
with BLOCKRELAY_INJECT_NUMERICS=x that goes on from the log. Digests are all the last one's.
"""

import hashlib
import json
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.host.cpu import cores
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.protocol.tensors import to_float16
from blockrelay.text.tokenizer import Tokenizer, VisibleText
from blockrelay_worker.offline.pipeline import Pipeline, generate


def main(model: str) -> None:
    folder = open_block_folder(Path(model))
    tokenizer = Tokenizer.from_file(folder.tokenizer_path) if folder.tokenizer_path is not None else None

    @cache
    def pipeline(salt: str) -> Pipeline:
        return Pipeline(folder, stages=1, threads=cores(), tokens=folder.model.max_position, salt=salt)

    for line in sys.stdin:
        asked = json.loads(line)
        salts = asked.get("salts", [["", None]])
        if "cuts" in asked:
            tell({"digests": _digests(pipeline(salts[-1][0]), asked["prompt"], asked["cuts"])})
            continue
        params = SamplingParams.from_dict(asked["params"])
        assert params.seed is not None, "without a seed there is nothing to compare"
        tokens: list[int] = []
        reason = ""
        for salt, end in salts:
            done = generate(
                pipeline(salt), asked["prompt"], params, seed=params.seed, tokenizer=tokenizer, known=tokens
            )
            tokens, reason = [*tokens, *done.tokens][:end], done.finish_reason
        text = ""
        if tokenizer is not None:
            visible = VisibleText.of(tokenizer, params, folder.model.eos_ids, asked["prompt"])
            text = visible.push_all(tokens) + visible.finish()
        tell({"tokens": tokens, "text": text, "finish_reason": reason})


def _digests(pipeline: Pipeline, prompt: list[int], cuts: list[int]) -> list[str]:
    """SHA-256 of the float16 logits of the last of the first `cut` tokens, for each cut (ascending)."""
    found: list[str] = []
    for first, end in pairwise([0, *cuts]):
        row = pipeline.run(prompt[first:end], first, wanted=True, seconds={})
        assert row is not None
        found.append(hashlib.sha256(to_float16(row).astype("<f2").tobytes()).hexdigest())
    return found


def tell(fields: dict[str, Any]) -> None:
    """Write one answer, a JSON object in a line of its own."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])

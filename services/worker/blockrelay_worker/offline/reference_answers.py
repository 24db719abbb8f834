"""`python -m blockrelay_worker.offline.reference_answers MODEL... < REQUESTS > ANSWERS`: the right answers to requests.

One JSON object per line, both ways. {"prompt": [ids], "params": SamplingParams.to_dict(), with a seed} gives {"tokens",
"text", "finish_reason"}; "shown" beside them are special tokens whose names are part of the text. {"prompt", "cuts":
[positions]} gives {"digests"}: for each cut the SHA-256, in hex, of the float16 logits (little-endian) after that many
tokens. Cuts are at least 1 and ascend. Text is empty without a tokenizer. Each request runs alone, without services,
other requests in a batch, reused KV pages and drafts. In exact precisions every other way to run it must give the same
answer.

"numerics": [[["", 0], 17], [["x", 1], null]] beside a prompt: the first 17 new tokens are those of a normal worker with
the first MODEL, the rest those of a worker with the second one and BLOCKRELAY_INJECT_NUMERICS=x that continues from the
log. Digests are all of the last entry.
"""

import hashlib
import json
import sys
from collections.abc import Sequence
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


def main(models: Sequence[str]) -> None:
    """Answers the requests on stdin with the block folders `models`, one model in several precisions, until stdin ends.

    It is for tests and trusts its input: a malformed request ends it with a traceback.
    """
    folders = [open_block_folder(Path(model)) for model in models]
    folder = folders[0]
    tokenizer = Tokenizer.from_file(folder.tokenizer_path) if folder.tokenizer_path is not None else None

    @cache
    def pipeline(salt: str, number: int) -> Pipeline:
        return Pipeline(folders[number], stages=1, threads=cores(), tokens=folder.model.max_position, salt=salt)

    for line in sys.stdin:
        request = json.loads(line)
        numerics = request.get("numerics", [[["", 0], None]])
        if "cuts" in request:
            tell({"digests": _digests(pipeline(*numerics[-1][0]), request["prompt"], request["cuts"])})
            continue
        params = SamplingParams.from_dict(request["params"])
        assert params.seed is not None, "without a seed there is nothing to compare"
        tokens: list[int] = []
        reason = ""
        for one, end in numerics:
            done = generate(
                pipeline(*one), request["prompt"], params, seed=params.seed, tokenizer=tokenizer, known=tokens
            )
            tokens, reason = [*tokens, *done.tokens][:end], done.finish_reason
        text = ""
        if tokenizer is not None:
            shown = request.get("shown", ())
            visible = VisibleText(tokenizer, params, folder.model.eos_ids, request["prompt"], shown)
            text = visible.push_all(tokens) + visible.finish()
        tell({"tokens": tokens, "text": text, "finish_reason": reason})


def _digests(pipeline: Pipeline, prompt: list[int], cuts: list[int]) -> list[str]:
    """SHA-256, for each cut (ascending), of the float16 logits of the last of the prompt's first `cut` tokens."""
    digests: list[str] = []
    for first, end in pairwise([0, *cuts]):
        row = pipeline.run(prompt[first:end], first)[0]
        digests.append(hashlib.sha256(to_float16(row).astype("<f2").tobytes()).hexdigest())
    return digests


def tell(fields: dict[str, Any]) -> None:
    """Writes one answer to stdout: a JSON object in a line of its own."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])

"""`python -m blockrelay_worker.offline.reference_logits MODEL < ANSWERS > DISTANCES`: how far answers are off.

One JSON object per line, both ways. The first line of stdout is {"tolerance": {"token", "row"}}: how far off other
right computations of this model may be. Behind it comes one {"off": [...]} for each line of stdin, in order:

    {"prompt": [ids], "answer": [ids]}                  of each token of the answer, how far it is behind the best one
    {"prompt": [ids], "cuts": [positions],
     "logits": [base64 of float16]}                     of the logits behind so many tokens, how far they are off

Distances are parts of the length of the reference's row. No service has a part in these logits, and no batch mates; nor
has a KV page, where the model is ONNX blocks that others made. MODEL is then the folder that describes them.
"""

import base64
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from blockrelay.block_folder.folder import open_block_folder
from blockrelay_worker.offline.reference_answers import tell
from blockrelay_worker.offline.reference_logits.distances import apart, behind_best
from blockrelay_worker.offline.reference_logits.models import Array, OnnxFiles, OwnKernels, ReferenceModel

#: Tokens that are in memory at a time, with what blocks have made of them and their logits.
GROUP_TOKENS = 2048


def main(root: str) -> None:
    folder = open_block_folder(Path(root))
    model: ReferenceModel = OwnKernels(folder) if folder.model.onnx_blocks is None else OnnxFiles(folder)
    tell({"tolerance": model.tolerance._asdict()})
    for group in groups([json.loads(line) for line in sys.stdin]):
        for asked, rows in zip(group, model.rows([tokens_of(asked) for asked in group]), strict=True):
            tell({"off": distances(asked, rows)})


def tokens_of(asked: dict[str, Any]) -> list[int]:
    """The tokens behind which logits are needed: nobody asks what comes behind the last one of an answer."""
    if "cuts" in asked:
        return asked["prompt"][: asked["cuts"][-1]]
    return [*asked["prompt"], *asked["answer"][:-1]]


def distances(asked: dict[str, Any], rows: Array) -> list[float]:
    """Of an answer, or of the logits of a session, by the reference's `rows` behind `tokens_of`."""
    if "cuts" not in asked:
        return behind_best(rows[len(asked["prompt"]) - 1 :], asked["answer"])
    seen = [np.frombuffer(base64.b64decode(row), "<f2") for row in asked["logits"]]
    right = rows[[cut - 1 for cut in asked["cuts"]]]
    return [off for row, own in zip(seen, right, strict=True) for off in apart(row[None], own[None])]


def groups(asked: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """All of them in their order, in groups of GROUP_TOKENS tokens at most, or of one."""
    group, tokens = list[dict[str, Any]](), 0
    for one in asked:
        more = len(tokens_of(one))
        if group and tokens + more > GROUP_TOKENS:
            yield group
            group, tokens = [], 0
        group.append(one)
        tokens += more
    if group:
        yield group


if __name__ == "__main__":
    main(sys.argv[1])

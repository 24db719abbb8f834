"""`python -m blockrelay_worker.offline.reference_logits MODEL < ANSWERS > DISTANCES`: measures the errors of answers.

One JSON object per line, both ways. The first line of stdout is {"tolerance": {"token", "row"}}: the distances that
other right computations of this model may have. Then comes one {"off": [...]} for each line of stdin, in order:

    {"prompt": [ids], "answer": [ids],
     "params": SamplingParams.to_dict()}            for each token of the answer, how far it is behind the best one
    {"prompt": [ids], "cuts": [positions],
     "logits": [base64 of float16]}                 for the logits after each cut, their distance from the right ones

Cuts are ascending and at least 1: each is the number of tokens before it. An answer has at least one token. The best
token is the one behind penalties, biases and the mask of a grammar, as "params" say; without them the model's.

Distances of logits are shares of the length (norm) of the reference's row, both without their mean. Those of tokens are
shares of the length that 512 logits of the row have on average. All of stdin is read before the first answer is
measured.

The reference runs each request alone, without services, and without KV pages if the model is ONNX blocks of other
makers. MODEL is then the folder that describes them.
"""

import base64
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_worker.offline.reference_answers import tell
from blockrelay_worker.offline.reference_logits.changes import changed
from blockrelay_worker.offline.reference_logits.distances import apart, behind_best
from blockrelay_worker.offline.reference_logits.models import Array, OnnxFiles, OwnKernels, ReferenceModel

#: Maximum number of tokens in memory at a time, with their hidden rows and logits.
GROUP_TOKENS = 2048


def main(root: str) -> None:
    """Measures the answers on stdin with the model in folder `root`."""
    folder = open_block_folder(Path(root))
    model: ReferenceModel = OwnKernels(folder) if folder.model.onnx_blocks is None else OnnxFiles(folder)
    tell({"tolerance": model.tolerance._asdict()})
    for group in groups([json.loads(line) for line in sys.stdin]):
        for answer, rows in zip(group, model.rows([tokens_of(answer) for answer in group]), strict=True):
            tell({"off": distances(answer, rows, folder)})


def tokens_of(answer: dict[str, Any]) -> list[int]:
    """The tokens whose logits measure `answer`, a line of stdin: those before its last cut, else all but the last."""
    if "cuts" in answer:
        return answer["prompt"][: answer["cuts"][-1]]
    return [*answer["prompt"], *answer["answer"][:-1]]


def distances(answer: dict[str, Any], rows: Array, folder: BlockFolder) -> list[float]:
    """The errors of the tokens of `answer`, a line of stdin, or of its logits.

    `rows` are the reference's logits [tokens, vocabulary] for `tokens_of(answer)`, by the model in `folder`.
    """
    if "cuts" not in answer:
        prompt, tokens = answer["prompt"], answer["answer"]
        own, params = rows[len(prompt) - 1 :], SamplingParams.from_dict(answer.get("params", {}))
        best = changed(own, prompt, tokens, params, folder) if params.changes_logits else own
        return behind_best(own, tokens, best)
    seen = [np.frombuffer(base64.b64decode(row), "<f2") for row in answer["logits"]]
    right = rows[[cut - 1 for cut in answer["cuts"]]]
    return [off for row, own in zip(seen, right, strict=True) for off in apart(row[None], own[None])]


def groups(answers: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The answers (lines of stdin), in order, in groups of at most GROUP_TOKENS tokens; a longer one is alone."""
    group, tokens = list[dict[str, Any]](), 0
    for one in answers:
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

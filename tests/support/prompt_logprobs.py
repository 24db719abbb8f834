"""Log probabilities of a prompt as the definition gives them: row by row, from a model that runs alone."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from blockrelay.protocol.encoding.prompt_logprobs import PromptLogprobs
from blockrelay_worker.offline.pipeline import Pipeline
from blockrelay_worker.sampling.sampler import log_probabilities

CHUNK_ROWS = 100


def reference_scores(pipeline: Pipeline, prompt: Sequence[int], *, listed: int) -> str:
    """What the end of a request with this prompt has, by NumPy from the logits of a solo run."""
    chunks: list[NDArray[np.float32]] = []
    for first in range(0, len(prompt) - 1, CHUNK_ROWS):
        chunk = prompt[first : min(first + CHUNK_ROWS, len(prompt) - 1)]
        chunks.append(pipeline.run(chunk, first, wanted=range(len(chunk))).copy())
    return scores_by_numpy([row for rows in chunks for row in rows], prompt, listed=listed)


def scores_by_numpy(rows: Sequence[NDArray[np.float32]], prompt: Sequence[int], *, listed: int) -> str:
    """What the end of a request has by these rows of logits [vocab], one for each token of the prompt but the last."""
    logprobs, ranks = list[float](), list[int]()
    top_ids, top_logprobs = list[list[int]](), list[list[float]]()
    for row, token in zip(rows, prompt[1:], strict=True):
        values, order = log_probabilities(row), np.argsort(-row, kind="stable")
        logprobs.append(float(values[token]))
        ranks.append(1 + int(np.flatnonzero(order == token)[0]))
        top_ids.append(order[:listed].tolist())
        top_logprobs.append(values[order[:listed]].tolist())
    count = len(prompt) - 1
    return PromptLogprobs(
        logprobs=np.array(logprobs, np.float64),
        ranks=np.array(ranks, np.uint32),
        top_ids=np.array(top_ids, np.uint32).reshape(count, listed),
        top_logprobs=np.array(top_logprobs, np.float64).reshape(count, listed),
    ).encode()

"""The last stage: from logits to what is committed. Pure but for the run it advances."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.protocol.end_meta import encode_end_meta
from blockrelay.protocol.messages import Commit, TokenLogprobs
from blockrelay_worker.engine.run import Run
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.sampling.sampler import sample
from blockrelay_worker.sampling.stop_conditions import FinishReason, advance


def next_tokens(run: Run, drafts: Sequence[int], logits: NDArray[np.float32], role: StageRole) -> Commit:
    """Choose the token after `run.tokens` and those after `drafts` that turn out right; say what to commit.

    `logits` [1 + drafts, vocab], finite: of the last known token and of each draft behind it. A row counts only if its
    token is the one that was chosen, so every token is the one that a step without drafts would give.
    Mutates `run` (tokens, computed, progress, committed, ended).
    """
    assert run.progress is not None and not run.ended
    position, tokens = run.committed, list[int]()
    logprobs: list[str] = []
    end: FinishReason | None = None
    for row, draft in zip_longest(logits, drafts):
        sampled = sample(row, run.params, seed=run.seed, position=len(run.tokens))
        run.tokens.append(sampled.token)
        tokens.append(sampled.token)
        if sampled.logprob is not None:
            logprobs.append(TokenLogprobs(sampled.logprob, sampled.top).encode())
        end = advance(run.progress, sampled.token)
        if end is not None or sampled.token != draft:
            break
    run.committed += len(tokens)
    run.computed = len(run.tokens) - 1
    run.ended = end is not None
    return Commit(
        request=run.request,
        run=run.id,
        position=position,
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        end=end or "",
        meta=end_meta(run, role) if end else "",
    )


def tensor_end(run: Run, role: StageRole) -> Commit:
    """The commit that ends a tensor step: no token, the result lies on the payload Redis. Mutates `run.ended`."""
    run.ended = True
    return Commit(request=run.request, run=run.id, position=0, tokens=(), end="tensor", meta=end_meta(run, role))


def end_meta(run: Run, role: StageRole) -> str:
    """What the terminal entry tells about the last run: times, devices, route, seed, prompt tokens not computed."""
    meta: dict[str, Any] = {
        "execution_times": run.block_seconds(),
        "gpu_blocks": list(run.gpu_blocks + role.gpu_blocks),
        "route": list(run.route),
        "seed": run.seed,
        "cached_tokens": min(run.cached, run.prompt_length),
    }
    return encode_end_meta(meta)

"""The last stage: from logits to what is committed. Pure but for the run it advances."""

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.messages import Commit, TokenLogprobs
from blockrelay_worker.advance import advance
from blockrelay_worker.runs import Run
from blockrelay_worker.sampler import sample
from blockrelay_worker.stage import StageRole


def next_token(run: Run, logits: NDArray[np.float32], role: StageRole) -> Commit:
    """Choose the token after `run.tokens` from `logits` [vocab], append it to the run and say what to commit.

    Mutates `run` (tokens, progress, committed, ended). `logits` must be finite.
    """
    assert run.progress is not None and not run.ended
    sampled = sample(logits, run.params, seed=run.seed, position=len(run.tokens))
    run.tokens.append(sampled.token)
    end = advance(run.progress, sampled.token)
    position = run.committed
    run.committed += 1
    run.ended = end is not None
    logprobs = () if sampled.logprob is None else (TokenLogprobs(sampled.logprob, sampled.top).encode(),)
    return Commit(
        request=run.request,
        run=run.run,
        position=position,
        tokens=(sampled.token,),
        logprobs=logprobs,
        end=end or "",
        meta=end_meta(run, role) if end else "",
    )


def tensor_end(run: Run, role: StageRole) -> Commit:
    """The commit that ends a tensor step: no token, the result lies on the payload Redis. Mutates `run.ended`."""
    run.ended = True
    return Commit(request=run.request, run=run.run, position=0, tokens=(), end="tensor", meta=end_meta(run, role))


def end_meta(run: Run, role: StageRole) -> str:
    """What the terminal entry tells about the last run: seconds per block, which blocks ran on a GPU, route, seed."""
    meta: dict[str, Any] = {
        "execution_times": {block: round(seconds, 6) for block, seconds in run.block_seconds.items()},
        "gpu_blocks": list(run.gpu_blocks + role.gpu_blocks),
        "route": list(run.route),
        "seed": run.seed,
    }
    return json.dumps(meta)

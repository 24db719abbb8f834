"""A run as tests put it on a table: what they do not say is the same everywhere."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_worker.runs.run import FirstStageState, LastStageState, LaterStageState, Run

GREEDY = SamplingParams(max_tokens=100, temperature=0)


def new_run(
    request_id: str,
    prompt: Sequence[int],
    *,
    route: tuple[str, ...] = ("w",),
    params: SamplingParams = GREEDY,
    first: bool = True,
    skip_prefix_cache: bool = False,
    private: bool = False,
    limit: int | None = None,
    reruns: int = 0,
    **body: Any,
) -> Run:
    """Run `request_id` of that request, with a last stage's state; `limit`: how many tokens it may find; `body`:
    fields of its body."""
    return Run(
        request_id=request_id,
        run_id=request_id,
        route=route,
        body=RequestBody(prompt=np.array(prompt, np.int32), params={}, **body),
        params=params,
        seed=1,
        context=512,
        reusable_limit=0 if skip_prefix_cache else limit,
        private=private,
        reruns=reruns,
        known=prompt,
        first=FirstStageState() if first else None,
        later=None if first else LaterStageState(),
        last=LastStageState(),
    )

"""The next token as a pure function of (logits row, parameters, seed, position)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockrelay.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One new token.

    `logprob` and `top` (id, log probability; most likely first, ties by lower id) are of the model's own
    distribution, before temperature and filters, as OpenAI's are; None and empty unless params.logprobs was set.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample(logits: NDArray[np.float32], params: SamplingParams, *, seed: int, position: int) -> Sampled:
    """Choose the token for `position` (0-based index in the request's tokens, prompt included) from `logits` [vocab].

    `seed` is the request's seed, given or derived (any integer, taken modulo 2**64). `logits` must be finite.
    """
    raise NotImplementedError

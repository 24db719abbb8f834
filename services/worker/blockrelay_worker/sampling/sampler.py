"""The next token as a pure function of (logits row, parameters, seed, position).

Order of the steps: temperature, top_k, top_p, min_p, draw. The draw takes one number in [0, 1) from Philox keyed by
(seed, position) and walks the kept tokens in order of their ids. There is no generator state: position p gets the same
token in any batch, process or year. Ties, in every step, go to the lowest id.
All arithmetic is float64 from `exact_math`, because NumPy's own functions differ between CPUs.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_worker.execution.selection import MAX_LARGEST, Largest, LogitRow, Need
from blockrelay_worker.kernels.arguments import F32, F64
from blockrelay_worker.sampling import exact_math

#: Tokens whose logit lies this far (after temperature) below the best one are never drawn: all of a vocabulary of a
#: million together have a probability below 2**-53, less than one step of the random number.
_UNREACHABLE = -51.0


#: The token of a draw from a row of which no token is allowed.
NO_TOKEN = -1
#: What a request is told that ends for lack of a token.
NOTHING_FOLLOWS = (
    "no token is left to follow: bad_words, logit_bias, penalties, min_tokens and the grammar together allow none; "
    "leave one of them out"
)


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """What one token is drawn from, and by.

    `row` has all logits, float32 [vocab], or the part that `need_of` names, which gives the same token. Logits must be
    finite. `seed` is the request's seed, given or derived (any integer, taken modulo 2**64). `position` is the 0-based
    index of the token in the request's tokens, prompt included.

    `changes` (ids [n] of different tokens, 0 or more, and their logits [n] for this draw) and `allowed` (bit i % 32 of
    word i / 32: token i may be drawn) need a whole row. Log probabilities are those of `row`, without them.
    """

    row: LogitRow
    params: SamplingParams
    seed: int
    position: int
    changes: tuple[NDArray[np.int64], NDArray[np.float64]] | None = None
    allowed: NDArray[np.uint32] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One sampled token, or NO_TOKEN.

    `logprob` and `top` (id, log probability; most likely first, ties by lower id) are those of the model's
    distribution, before temperature and filters, as in OpenAI's API. None and empty unless params.logprobs is set.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def need_of(params: SamplingParams) -> Need | None:
    """The part of a row of logits that `sample` needs for these parameters; None: all of it."""
    if params.logprobs is not None or params.changes_logits:
        return None
    if params.temperature == 0:
        return Need(temperature=0.0)
    if 0 < params.top_k <= MAX_LARGEST or (params.top_k == 0 and (params.top_p < 1 or params.min_p > 0)):
        return Need(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    return None


def sample(draw: Draw) -> Sampled:
    """Chooses a token: the definition of what every sampler gives."""
    row, params = draw.row, draw.params
    logits = row.logits if isinstance(row, Largest) else row
    total = row.total if isinstance(row, Largest) else None
    changed = logits if draw.changes is None and draw.allowed is None else _changed(logits, draw)
    if changed.max() == -np.inf:
        return Sampled(token=NO_TOKEN)
    u = uniform(draw.seed, draw.position)
    chosen = int(changed.argmax()) if params.temperature == 0 else _draw(changed, params, u, total)
    token = int(row.ids[chosen]) if isinstance(row, Largest) else chosen
    if params.logprobs is None:
        return Sampled(token=token)
    logprobs = log_probabilities(logits)
    best = _largest(logprobs, params.logprobs)
    return Sampled(
        token=token, logprob=float(logprobs[token]), top=tuple((int(index), float(logprobs[index])) for index in best)
    )


def uniform(seed: int, position: int) -> float:
    """The random number for a position, in [0, 1): the upper 53 bits of NumPy's Philox, times 2**-53.

    Its key is `seed` modulo 2**64, its counter `position` (>= 0).
    """
    philox = np.random.Philox(key=seed % 2**64, counter=position)
    return (int(philox.random_raw()) >> 11) * 2.0**-53


def log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """The log softmax of one row of logits [vocab]."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return shifted - exact_math.log(float(exact_math.running_sum(exact_math.exp(shifted))[-1]))


def _changed(logits: NDArray[np.float32], draw: Draw) -> NDArray[np.float64]:
    """Returns a row of logits with its changes, and minus infinity for tokens that may not be drawn."""
    assert not isinstance(draw.row, Largest), "the largest logits do not decide a draw from a changed row"
    row = logits.astype(np.float64)
    if draw.changes is not None:
        ids, values = draw.changes
        row[ids] = values
    if draw.allowed is not None:
        bits = np.unpackbits(draw.allowed.astype("<u4").view(np.uint8), count=row.size, bitorder="little")
        row[bits == 0] = -np.inf
    return row


def _draw(logits: F32 | F64, params: SamplingParams, u: float, total: float | None) -> int:
    """Draws an index into `logits` with the random number `u`.

    `total` is the sum of the weights of the whole row, if `logits` are only its largest ones; else None.
    """
    with np.errstate(over="ignore"):  # with a tiny temperature minus infinity is the right result
        scaled = (logits.astype(np.float64) - float(logits.max())) / params.temperature
    kept = np.flatnonzero(scaled >= _UNREACHABLE)
    if params.top_k > 0:
        total = None  # the sum is that of the top_k tokens, which are all here
    if 0 < params.top_k < kept.size:
        kept = kept[np.sort(_largest(scaled[kept], params.top_k))]
    weights = exact_math.exp(scaled[kept])
    if params.top_p < 1:
        inside = _nucleus(weights, params.top_p, total)
        kept, weights = kept[inside], weights[inside]
    if params.min_p > 0:
        likely = weights >= params.min_p  # the best token's weight is exp(0) = 1
        kept, weights = kept[likely], weights[likely]
    reached = exact_math.running_sum(weights)
    chosen = int(np.searchsorted(reached, u * float(reached[-1]), side="right"))
    return int(kept[min(chosen, kept.size - 1)])  # u * total may round up to the total


def _nucleus(weights: NDArray[np.float64], share: float, total: float | None) -> NDArray[np.intp]:
    """Indexes, ascending, of the fewest largest weights whose sum reaches `share` of `total` (None: of their sum)."""
    wanted = share * (float(exact_math.running_sum(weights)[-1]) if total is None else total)
    # A few are usually enough; sums of a longer list begin with the same bits, so `count` does not change the result.
    for count in (64, 1024, weights.size):
        order = _largest(weights, min(count, weights.size))
        reached = exact_math.running_sum(weights[order])
        if reached[-1] >= wanted:
            return np.sort(order[: int(np.searchsorted(reached, wanted, side="left")) + 1])
    return np.arange(weights.size)  # by rounding, even the sum of all in this order may stay below


def _largest(values: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Indexes of the `count` largest values, largest first, ties by lower index."""
    if count == 0:
        return np.empty(0, np.intp)
    if count < values.size:
        threshold = np.partition(values, values.size - count)[values.size - count]
        candidates = np.flatnonzero(values >= threshold)  # includes all ties of the smallest one
    else:
        candidates = np.arange(values.size)
    order = np.argsort(-values[candidates], kind="stable")
    return candidates[order[:count]]

"""Draws the tokens of all rows of a step at once, in C++ where there are kernels; `sampler` defines the results."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from blockrelay.protocol.sampling_params import MAX_LOGPROBS
from blockrelay_worker.execution.selection import Largest
from blockrelay_worker.kernels.interface import Kernels
from blockrelay_worker.kernels.sampled_rows import SAMPLED_ROW
from blockrelay_worker.sampling.sampler import NO_TOKEN, Draw, Sampled, sample

#: Returns what each Draw gives. Raises ExecutionError if there is no memory to draw in.
Sampler: TypeAlias = Callable[[Sequence[Draw]], list[Sampled]]


def sampler_of(kernels: Kernels) -> Sampler:
    """Returns a sampler that draws rows in parallel on the threads of `kernels`, or one that uses NumPy without any.

    Both give the same bits. The interpreter lock is free while the first one draws.
    """
    if not kernels.has_sampling:
        return lambda draws: [sample(draw) for draw in draws]
    return lambda draws: _sample_all(kernels, draws)


def _sample_all(kernels: Kernels, draws: Sequence[Draw]) -> list[Sampled]:
    rows = np.array([_record(draw) for draw in draws], SAMPLED_ROW)
    width = MAX_LOGPROBS if any(draw.params.logprobs is not None for draw in draws) else 0
    ids, logprobs = np.empty((len(draws), width), np.int64), np.empty((len(draws), width))
    kernels.sample(rows, ids, logprobs)
    tokens: list[int] = rows["token"].tolist()
    sampled: list[Sampled] = []
    for i, (draw, token) in enumerate(zip(draws, tokens, strict=True)):
        if token < 0:
            sampled.append(Sampled(token=NO_TOKEN))
        elif isinstance(draw.row, Largest):
            sampled.append(Sampled(token=int(draw.row.ids[token])))
        elif draw.params.logprobs is None:
            sampled.append(Sampled(token=token))
        else:
            count = min(draw.params.logprobs, draw.row.size)
            top = tuple(zip(ids[i, :count].tolist(), logprobs[i, :count].tolist(), strict=True))
            sampled.append(Sampled(token=token, logprob=float(rows["logprob"][i]), top=top))
    return sampled


def _record(draw: Draw) -> tuple[float, ...]:
    """Returns the SAMPLED_ROW of a draw, whose arrays must outlive it."""
    logits, total = (draw.row.logits, draw.row.total) if isinstance(draw.row, Largest) else (draw.row, np.nan)
    assert logits.dtype == np.float32, f"logits are float32, not {logits.dtype}"
    assert logits.flags.c_contiguous, "a row of logits is contiguous"
    params, changes, allowed = draw.params, (0, 0, 0), 0
    plain = draw.changes is None and draw.allowed is None and params.logprobs is None
    assert plain or not isinstance(draw.row, Largest), "this draw needs the whole row"
    if draw.changes is not None:
        ids, values = draw.changes
        assert (ids.dtype, values.dtype, ids.shape) == (np.int64, np.float64, values.shape), "a logit for each id"
        assert ids.ndim == 1 and ids.flags.c_contiguous and values.flags.c_contiguous, "changes are contiguous"
        changes = (_address(ids), _address(values), ids.size)
    if draw.allowed is not None:
        assert draw.allowed.dtype == np.uint32 and draw.allowed.flags.c_contiguous, "contiguous words of 32 bits"
        assert draw.allowed.size * 32 >= logits.size, "a bit for each token"
        allowed = _address(draw.allowed)
    return (
        *(_address(logits), allowed, *changes, logits.size),
        *(draw.seed % 2**64, draw.position, params.temperature, params.top_p, params.min_p),
        *(total, params.top_k, -1 if params.logprobs is None else params.logprobs, -1, 0.0),
    )


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address

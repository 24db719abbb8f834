"""Distances of tokens and rows from reference logits, as shares of the length of the reference's row. Pure."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import Precision, quantises_rows


class Tolerance(NamedTuple):
    """The largest distances of a right computation: of a `token` from the best one, of a `row` from the reference's."""

    token: float
    row: float


FLOAT32, FLOAT16 = Tolerance(1e-3, 1e-3), Tolerance(2e-2, 2e-2)
#: Tolerance of computations that round rows to 8 bits or have weights of few bits, the least exact ones. Of 50,000 rows
#: of the bundled model (w8a8), compared with a device in float32, the worst was off by 0.146, and the worst token by
#: 0.016. Nine of ten rows of a neighbouring position are off by 0.24 or more.
FEW_BITS = Tolerance(0.05, 0.25)
#: Number of logits whose share of a row's length is the unit for tokens. A row's error is spread over its logits: with
#: a large vocabulary, a share of the whole length would exceed the difference between any two logits.
LOGITS_OF_A_LENGTH = 512
Rows = NDArray[np.float64]


def tolerance_of(precisions: Collection[Precision], *, packed: bool = False) -> Tolerance:
    """The tolerance of a model with blocks of these precisions.

    `packed`: weights of ONNX blocks have few bits (their precisions describe the KV alone).
    """
    if packed or any(quantises_rows(precision) for precision in precisions):
        return FEW_BITS
    return FLOAT32 if set(precisions) == {"fp32"} else FLOAT16


def behind_best(rows: NDArray[Any], tokens: Sequence[int], changed: NDArray[Any] | None = None) -> list[float]:
    """For each token, how far its logit is below the best one of its row in `rows` [tokens, vocabulary].

    `changed` has the logits of the same shape from which the tokens were chosen (None: `rows`), perhaps with minus
    infinity.

    In units of the length that LOGITS_OF_A_LENGTH logits of the row have on average (all, if there are fewer). Infinite
    for a token outside the vocabulary. NaN for a row with NaN or plus infinity. `rows` has one row for each token, and
    none with minus infinity or of zeros alone.
    """
    wide = rows.astype(np.float64)
    distances: list[float] = []
    for row, logits, token in zip(wide, wide if changed is None else changed, tokens, strict=True):
        own = float(logits[token]) if 0 <= token < len(row) else -np.inf
        share = min(1.0, LOGITS_OF_A_LENGTH / len(row))
        distances.append((float(logits.max()) - own) / (_length(row) * share**0.5))
    return distances


def apart(rows: NDArray[Any], right: NDArray[Any]) -> list[float]:
    """For each row, its distance from the reference's row in `right`, as a share of the latter's length.

    `rows` and `right` are [n, vocabulary]; NaN for each row if their shapes differ. Each row is taken without its mean,
    on which no token depends. No row of `right` may be constant.
    """
    if rows.shape != right.shape:
        return [float("nan")] * len(rows)
    pairs = zip(_centred(rows), _centred(right), strict=True)
    return [_length(row - own) / _length(own) for row, own in pairs]


def _centred(rows: NDArray[Any]) -> Rows:
    wide = rows.astype(np.float64)
    return wide - wide.mean(axis=1, keepdims=True)


def _length(row: Rows) -> float:
    return float(np.linalg.norm(row))

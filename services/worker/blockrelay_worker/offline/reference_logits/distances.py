"""How far tokens and rows are from reference logits, as parts of the length of the reference's row. Pure."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import Precision, quantises_rows


class Tolerance(NamedTuple):
    """How far off right computations may be: a `token` behind the best one, and a `row` from the reference's."""

    token: float
    row: float


FLOAT32, FLOAT16 = Tolerance(1e-3, 1e-3), Tolerance(2e-2, 2e-2)
#: Computations that round rows to 8 bits, or take weights of few bits, differ most from those that do not. Of 50,000
#: rows of the bundled model (w8a8) beside a device in float32 the worst was 0.146 off, and the worst token 0.016
#: behind. Nine of ten rows of a neighbouring position are off by 0.24 and more.
FEW_BITS = Tolerance(0.05, 0.25)
#: The error of a row is spread over its logits: a token of a large vocabulary may be no further behind the best one
#: than one among so many, or a part of the row's length would be more than there is between any two of them.
LOGITS_OF_A_LENGTH = 512
Rows = NDArray[np.float64]


def tolerance_of(precisions: Collection[Precision], *, packed: bool = False) -> Tolerance:
    """Of a model with blocks of these precisions; `packed`: weights of ONNX blocks have few bits, whatever these say of
    the KV."""
    if packed or any(quantises_rows(precision) for precision in precisions):
        return FEW_BITS
    return FLOAT32 if set(precisions) == {"fp32"} else FLOAT16


def behind_best(rows: NDArray[Any], tokens: Sequence[int]) -> list[float]:
    """For each token, how much less its logit is than the best one of its row [vocabulary], as a part of the length
    that LOGITS_OF_A_LENGTH of the row have on average, or all of it if it has fewer. A token that the row has no logit
    of is infinitely far behind, and one of a row that is not finite has no number (NaN)."""
    wide = rows.astype(np.float64)
    found: list[float] = []
    for row, token in zip(wide, tokens, strict=True):
        own = float(row[token]) if 0 <= token < len(row) else -np.inf
        share = min(1.0, LOGITS_OF_A_LENGTH / len(row))
        found.append((float(row.max()) - own) / (_length(row) * share**0.5))
    return found


def apart(rows: NDArray[Any], right: NDArray[Any]) -> list[float]:
    """For each row, how far it is from that of the reference, both less their mean, which no token depends on. A row of
    another length has no number (NaN)."""
    if rows.shape != right.shape:
        return [float("nan")] * len(rows)
    pairs = zip(_centred(rows), _centred(right), strict=True)
    return [_length(row - own) / _length(own) for row, own in pairs]


def _centred(rows: NDArray[Any]) -> Rows:
    wide = rows.astype(np.float64)
    return wide - wide.mean(axis=1, keepdims=True)


def _length(row: Rows) -> float:
    return float(np.linalg.norm(row))

"""exp and log in float64 whose bits are the same on every IEEE machine.

NumPy's own `exp` and `log` use other code on other CPUs, and then differ in the last bit. Here every operation is an
elementwise +, -, *, / or rounding, each correctly rounded and never contracted (no FMA), and sums go from left to
right. Any change may change sampled tokens: it needs a new version of the model's numerics.
"""

import math

import numpy as np
from numpy.typing import NDArray

_LOG2_E = 1.4426950408889634
#: ln 2 in two parts; the first has 32 significant bits, so that a small integer times it is exact (fdlibm's split).
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
#: 1/n! for n = 13..0. |r| <= ln(2)/2, so the first term left out is below 1e-17 of the result.
_TAYLOR = [1.0 / math.factorial(n) for n in range(13, -1, -1)]
#: `exp` returns 0 below this: far less than a probability of 53 bits can represent.
EXP_FLOOR = -700.0


def exp(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """e**x for x <= 0, relative error below 1e-15; 0 below EXP_FLOOR. NaN is not allowed."""
    clamped = np.maximum(x, EXP_FLOOR)
    k = np.rint(clamped * _LOG2_E)
    r = (clamped - k * _LN2_HIGH) - k * _LN2_LOW
    p = np.full_like(r, _TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        p *= r
        p += coefficient
    p *= ((k.astype(np.int64) + 1023) << 52).view(np.float64)  # 2**k, always a normal number here
    p[x < EXP_FLOOR] = 0.0
    return p


def log(x: float) -> float:
    """Natural logarithm of a positive normal number; absolute error below 1e-15 plus one part in 1e15."""
    mantissa, exponent = math.frexp(x)  # exact
    if mantissa < 0.7071067811865476:
        mantissa, exponent = mantissa * 2.0, exponent - 1
    # log(m) = 2 artanh(s), s = (m-1)/(m+1), |s| < 0.172: s**25/25 is below 1e-20.
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = 0.0
    for n in range(23, 0, -2):
        series = series * square + 1.0 / n
    return exponent * _LN2_HIGH + (exponent * _LN2_LOW + 2.0 * s * series)


def running_sum(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cumulative sums x[0], x[0]+x[1], ... added strictly from left to right (`np.sum` uses another order)."""
    return np.add.accumulate(x)

"""The float32 arithmetic below the NumPy kernels, held against exact fractions."""

import math
import struct
from fractions import Fraction

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from blockrelay_worker.kernels import float32

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def _bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def _rounded(exact: Fraction) -> float:
    """The float32 nearest to a fraction, ties to even, by integer arithmetic."""
    magnitude = abs(exact)
    if magnitude == 0:
        return 0.0
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, -126) - 23)
    nearest = round(magnitude / step) * step  # round() of a Fraction takes ties to even
    value = math.inf if nearest >= Fraction(2) ** 128 else float(nearest)
    return math.copysign(value, exact)


def _fma(a: float, b: float, c: float) -> float:
    with np.errstate(all="ignore"):
        return float(float32.fma(*(np.array([x], np.float32) for x in (a, b, c)))[0])


@given(a=FINITE, b=FINITE, c=FINITE)
@example(a=1 + 2**-12, b=1 + 2**-12, c=2.0**-60)  # half way but for a bit the double sum loses
@example(a=1 + 2**-12, b=1 + 2**-12, c=-(2.0**-60))
@example(a=2.0**-100, b=2.0**-49, c=2.0**-149)  # a tie among subnormals
@example(a=3.0 * 2.0**-100, b=2.0**-51, c=2.0**-149)
@example(a=2.0**127, b=2.0, c=-(2.0**104))
def test_fma_rounds_the_exact_value_once(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    result = _fma(a, b, c)
    assert _bits(result) == _bits(_rounded(exact)) if exact else result == 0


@given(
    a=st.integers(2**23, 2**24 - 1),
    b=st.integers(2**23, 2**24 - 1),
    c_exponent=st.integers(-60, 60),
    c=st.integers(-(2**24), 2**24),
    scale=st.integers(-149, 60),
)
def test_fma_rounds_once_near_ties_and_subnormals(a: int, b: int, c: int, c_exponent: int, scale: int) -> None:
    x, y = math.ldexp(a, -23), math.ldexp(b, scale - 23)
    z = float(np.float32(math.ldexp(c, min(scale + c_exponent, 100))))
    y = float(np.float32(y))
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    result = _fma(x, y, z)
    assert _bits(result) == _bits(_rounded(exact)) if exact else result == 0


@given(
    step=st.integers(-149, 60),
    c=st.integers(-(2**24), 2**24),
    half=st.integers(1, 23),
    signs=st.tuples(*[st.sampled_from([-1, 1])] * 3),
)
def test_fma_rounds_once_where_a_double_cannot_tell_a_tie(
    step: int, c: int, half: int, signs: tuple[int, int, int]
) -> None:
    a = signs[2] * math.ldexp(1 + signs[0] * 2.0**-half, step // 2)
    b = math.ldexp(1 + signs[1] * 2.0**-half, step - 1 - step // 2)
    exact = Fraction(a) * Fraction(b) + Fraction(math.ldexp(c, step))
    assert _bits(_fma(a, b, math.ldexp(c, step))) == _bits(_rounded(exact))


def test_fma_follows_the_rules_for_infinities_and_nan() -> None:
    assert _fma(math.inf, 1.0, -1.0) == math.inf
    assert math.isnan(_fma(math.inf, 1.0, -math.inf))
    assert math.isnan(_fma(math.inf, 0.0, 1.0))
    assert math.isnan(_fma(1.0, math.nan, 1.0))


def test_exp_is_within_two_units_of_the_last_place() -> None:
    x = np.linspace(-87, 88, 400_001, dtype=np.float32)
    exact = np.array([math.exp(float(value)) for value in x[::7]])
    assert np.max(np.abs(float32.exp(x)[::7] / exact - 1)) < 2**-22.5


def test_exp_is_defined_everywhere() -> None:
    x = np.array([-math.inf, -1e30, -88, 0, -0.0, 89, 1e30, math.inf, math.nan], np.float32)
    with np.errstate(all="ignore"):
        y = float32.exp(x)
    assert (y[:3] == float32.exp(np.array([-87], np.float32))).all()
    assert (y[3:5] == 1).all()
    assert (y[5:8] == float32.exp(np.array([88], np.float32))).all()
    assert np.isfinite(y[:8]).all() and np.isnan(y[8])


def _sum(a: float, b: float) -> float:
    return _rounded(Fraction(a) + Fraction(b))


def test_a_lane_sum_adds_element_i_to_lane_i_modulo_64_and_then_the_lanes() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(213).astype(np.float32)
    lanes = [0.0] * 64
    for i, value in enumerate(x.tolist()):
        lanes[i % 64] = _rounded(Fraction(value) ** 2 + Fraction(lanes[i % 64]))
    sums = [_sum(_sum(lanes[j], lanes[j + 16]), _sum(lanes[j + 32], lanes[j + 48])) for j in range(16)]
    total = sums[0]
    for lane in sums[1:]:
        total = _sum(total, lane)
    assert float(float32.lane_sum_of_squares(x)) == total

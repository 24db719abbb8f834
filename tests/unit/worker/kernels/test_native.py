"""Every native variant and thread count gives the bits of the NumPy kernels."""

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from blockrelay.errors import ExecutionError, UsageError
from blockrelay.host.cpu import cpu_facts
from blockrelay_worker import kernels as kernels_module
from blockrelay_worker.kernels import PAGE, Kernels, float32, load_kernels, supported_isas
from blockrelay_worker.kernels.libraries import (
    AVX2,
    AVX512,
    AVX_VNNI,
    SDOT,
    SMMLA,
    TILES,
    VNNI,
    cpu_features,
    isas_for,
)
from tests.support.worker.kernel_cases import NOT_FINITE, Rows, floats, rows, same_bits
from tests.support.worker.kernel_variants import NATIVE, REFERENCE, assert_same, every_variant

pytestmark = pytest.mark.skipif(not NATIVE, reason="no native kernels were built (no C++ compiler at install)")


@given(rows())
@settings(max_examples=60, deadline=None)
def test_row_kernels_give_the_bits_of_the_reference(case: Rows) -> None:
    gate_up = np.concatenate([case.x, case.other], axis=1)

    def call(kernels: Kernels) -> tuple[NDArray[Any], ...]:
        added, plain = case.other.copy(), case.other.copy()
        kernels.add_scaled(added, case.x, case.row_scale)
        kernels.add_scaled(plain, case.x, None)
        scaled = case.x.copy()
        kernels.scale_rows(scaled, case.row_scale)
        return (
            *kernels.quantise(case.x),
            *kernels.norm_quantise(case.x, case.weight, 1e-5),
            kernels.norm(case.x, case.weight, 1e-6),
            *kernels.swiglu_quantise(gate_up, case.row_scale, 0),
            kernels.swiglu(gate_up),
            added,
            plain,
            scaled,
        )

    assert_same(case, call)


@given(
    st.integers(0, 40), st.integers(1, 9), st.sampled_from([1.0, 0.0, 1e-42, 3e38, *NOT_FINITE]), st.integers(0, 2**32)
)
@settings(max_examples=60, deadline=None)
def test_rows_in_groups_give_the_bits_of_the_reference(count: int, groups: int, value: float, seed: int) -> None:
    # Given rows whose groups differ in size, some with one value that is odd
    rng = np.random.default_rng(seed)
    x, gate_up, weight = floats(rng, count, 32 * groups), floats(rng, count, 64 * groups), floats(rng, 32 * groups)
    x *= np.repeat(np.exp2(rng.integers(-20, 20, (count, groups))).astype(np.float32), 32, axis=1)
    x[::3, rng.integers(32 * groups)] = gate_up[::2, rng.integers(64 * groups)] = value
    row_scale = floats(rng, count)

    def call(kernels: Kernels) -> tuple[NDArray[Any], ...]:
        return (
            *kernels.quantise(x, group=32),
            *kernels.norm_quantise(x, weight, 1e-5, group=32),
            *kernels.swiglu_quantise(gate_up, row_scale, 32, group=32),
            *kernels.swiglu_quantise(gate_up, None, 0),
        )

    assert_same((count, groups, value), call)


@given(
    st.sampled_from([16, 32, 64, 128, 256, 512]),
    st.integers(1, 3),
    st.integers(0, 40),
    st.sampled_from([0.0, 1.0, 3e38, *NOT_FINITE]),
    st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_the_hadamard_step_gives_the_bits_of_the_reference(
    size: int, blocks: int, count: int, value: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    gate_up, row_scale = floats(rng, count, 2 * size * blocks), floats(rng, count)
    gate_up[::3, rng.integers(2 * size * blocks)] = value
    assert_same((size, blocks), lambda kernels: kernels.swiglu_quantise(gate_up, row_scale, size))


def test_values_half_way_between_two_steps_quantise_as_the_division_says() -> None:
    # Given rows whose values lie at and next to the points half way between two steps of their own scale
    rng = np.random.default_rng(2)
    largest = floats(rng, 400, 1)[:, 0]
    scale = np.abs(largest) * (np.float32(1) / np.float32(127)) + np.float32(1e-12)
    half_way = (rng.integers(-126, 126, (400, 60)) + np.float32(0.5)).astype(np.float32) * scale[:, None]
    x = np.concatenate([largest[:, None], half_way, np.nextafter(half_way, 0), half_way * (1 + 2.0**-23)], axis=1)
    x = x.astype(np.float32)
    quotient = x / scale[:, None]
    assert (quotient != x * (np.float32(1) / scale)[:, None]).any(), "a reciprocal would do as well"
    assert_same("half way", lambda kernels: kernels.quantise(x))
    groups = np.ascontiguousarray(x[:, : x.shape[1] // 32 * 32])
    assert_same("half way in groups", lambda kernels: kernels.quantise(groups, group=32))


def test_every_float_goes_to_float16_as_numpy_rounds_it() -> None:
    # Given every float16, the points half way between them, and their neighbours
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[:-1] + halves[1:]) * np.float32(0.5)
    up, down = np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, np.float32(0))
    tiny = np.array([1e-45, 2**-25, 2**-24, 65519.99, 65520, 7e4, 3e38, np.inf, np.nan], np.float32)
    positive = np.concatenate([halves, middles, up, down, tiny])
    values = np.concatenate([positive, -positive])
    values = np.pad(values, (0, -len(values) % 8)).reshape(-1, 1, 8)

    # When they are stored as the values of rows of one head
    qkv = np.zeros((len(values), 24), np.float32)
    qkv[:, 16:] = values[:, 0]
    index = np.arange(len(values), dtype=np.int32)
    table = np.zeros((1, 4), np.float32)

    def stored(kernels: Kernels) -> tuple[NDArray[Any], ...]:
        k_pages = np.zeros((len(values) // PAGE + 1, 1, 8, PAGE), np.float16)
        v_pages = np.zeros((len(values) // PAGE + 1, 1, PAGE, 8), np.float16)
        kernels.rotary_append(
            qkv, None, None, None, None, 1e-6, table, table, index * 0, index // PAGE, index % PAGE, k_pages, v_pages
        )
        return (v_pages.view(np.uint16),)

    # Then every variant agrees with the reference, and the reference with NumPy where nothing saturates
    assert_same("float16", stored)
    with np.errstate(over="ignore"):
        plain = values.astype(np.float16)
    ours = stored(REFERENCE)[0].reshape(-1, 8)[: len(values)]
    within = np.isfinite(plain.reshape(-1, 8))
    assert (ours[within] == plain.reshape(-1, 8).view(np.uint16)[within]).all()


def _awkward(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    """Floats whose products and sums tie, cancel, overflow or go below the normal floats."""
    ones = 1 + 2.0 ** -rng.integers(1, 25, shape)
    powers = 2.0 ** rng.integers(-75, 30, shape)
    small = rng.integers(1, 2**24, shape) * 2.0 ** -rng.integers(60, 150, shape)
    whole = rng.integers(0, 2**24, shape)
    with np.errstate(all="ignore"):
        wild = rng.integers(0, 2**32, shape, np.uint32).view(np.float32).astype(np.float64)
        kinds = np.stack([ones, powers, ones * powers, small, whole, wild])
        picked = np.take_along_axis(kinds, rng.integers(0, len(kinds), (1, *shape)), axis=0)[0]
        return (picked * rng.choice([-1, 1], shape)).astype(np.float32)


def _almost_ties(rng: np.random.Generator, *shape: int) -> list[NDArray[np.float32]]:
    """(a, b, c) with a*b a hair more or less than half a step of c, subnormal c included: a double loses the hair."""
    step = rng.integers(-149, 60, shape)
    half = rng.integers(1, 24, shape)
    near, far = 1 + rng.choice([-1, 1], shape) * 2.0**-half, 1 + rng.choice([-1, 1], shape) * 2.0**-half
    split = step // 2
    c = rng.integers(0, 2**24, shape) * rng.choice([-1, 1], shape)
    return [x.astype(np.float32) for x in (near * 2.0**split, far * 2.0 ** (step - 1 - split), c * 2.0**step)]


@pytest.mark.parametrize("seed", range(5))
def test_fma_rounds_once_in_every_variant(seed: int) -> None:
    # Given a rotation by (cos = b, sin = 1), whose first half is fma(x, b, c) where the second half of x is -c
    rng = np.random.default_rng(seed)
    count = 5000
    x, b, c = (_awkward(rng, count, 4) for _ in range(3))
    x[::2], b[::2], c[::2] = _almost_ties(rng, count // 2, 4)
    close = rng.random((count, 4)) < 0.5
    close[::2] = False
    with np.errstate(all="ignore"):
        c[close] = (-x * b * np.float32(1 + 2.0**-20))[close]
    qkv = np.zeros((count, 24), np.float32)
    qkv[:, :4], qkv[:, 4:8] = x, -c
    index = np.arange(count, dtype=np.int32)

    def turned(kernels: Kernels) -> tuple[NDArray[Any], ...]:
        pages = np.zeros((count // PAGE + 1, 1, 8, PAGE), np.float32)
        q = kernels.rotary_append(
            qkv, None, None, None, None, 1e-6, b, np.ones_like(b), index, index // PAGE, index % PAGE, pages,
            pages.reshape(-1, 1, PAGE, 8).copy(),
        )  # fmt: skip
        return (q,)

    # Then every variant agrees with the arithmetic that was checked against fractions
    with np.errstate(all="ignore"):
        assert same_bits(turned(REFERENCE)[0][:, 0, :4], float32.fma(x, b, c))
    assert_same("fma", turned)


def test_exp_rounds_its_exponent_alike_in_every_variant() -> None:
    # Given the floats around each point where the exponent changes
    middles = ((np.arange(-126, 127) + 0.5) * math.log(2)).astype(np.float32)
    around = middles.view(np.int32)[:, None] + np.arange(-32, 32, dtype=np.int32)
    gate_up = np.ones((len(middles), 128), np.float32)
    gate_up[:, :64] = -around.view(np.float32)
    assert_same("exp", lambda kernels: (kernels.swiglu(gate_up),))


@every_variant
def test_subnormals_are_kept(kernels: Kernels) -> None:
    x = np.full((1, 64), 1e-42, np.float32)
    added = x.copy()
    kernels.add_scaled(added, x, None)
    assert (added == x + x).all() and (added > 0).all()


def test_wrong_arguments_are_errors_that_name_the_argument() -> None:
    kernels, x = REFERENCE, np.zeros((4, 16), np.float32)
    wrong: Any
    for wrong in (x.astype(np.float64), x[:, ::2], x.T, x[0], np.zeros((4, 0), np.float32)):
        with pytest.raises(ExecutionError, match="argument x:"):
            kernels.quantise(wrong)
    with pytest.raises(ExecutionError, match="argument u:"):
        kernels.quantise(x, u=np.zeros((4, 15), np.uint8))
    with pytest.raises(ExecutionError, match="group: 16 columns have no groups of 32"):
        kernels.quantise(x, group=32)
    with pytest.raises(ExecutionError, match="group: 16 columns have no groups of 16"):
        kernels.quantise(x, group=16)
    with pytest.raises(ExecutionError, match=r"argument scale: .*\[4, 2\]"):
        kernels.quantise(np.zeros((4, 64), np.float32), group=32, scale=np.zeros(4, np.float32))
    with pytest.raises(ExecutionError, match="argument weight:"):
        kernels.norm(x, np.ones(15, np.float32), 1e-5)
    with pytest.raises(ExecutionError, match="argument y:"):
        kernels.add_scaled(x, x[:3], None)
    with pytest.raises(ExecutionError, match="gate_up: 15 columns"):
        kernels.swiglu(np.zeros((4, 15), np.float32))


@every_variant
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_indices_out_of_range_are_errors_and_nothing_is_written(
    kernels: Kernels, dtype: type[np.floating[Any]]
) -> None:
    pages = 3
    k_pages, v_pages = np.zeros((pages, 1, 8, PAGE), dtype), np.zeros((pages, 1, PAGE, 8), dtype)
    qkv, table = np.ones((2, 24), np.float32), np.ones((5, 4), np.float32)
    good = np.zeros(2, np.int32)
    for name, bad in (("positions", 5), ("page", 3), ("slot", 16), ("positions", -1), ("page", -1), ("slot", -1)):
        index = {"positions": good, "page": good, "slot": good, name: np.array([0, bad], np.int32)}
        with pytest.raises(ExecutionError, match=f"argument {name}: row 1 has {bad}"):
            kernels.rotary_append(
                qkv, None, None, None, None, 1e-6, table, table,
                index["positions"], index["page"], index["slot"], k_pages, v_pages,
            )  # fmt: skip
    assert not k_pages.any() and not v_pages.any()

    q = np.ones((2, 1, 8), np.float32)
    for table_, segment in (
        ([[0, 3]], (0, 2, 15)),  # a page that does not exist
        ([[0, -1]], (0, 2, 15)),
        ([[0, 1]], (0, 2, 31)),  # more positions than the line has pages for
        ([[0, 1]], (0, 1, 0)),  # a row without a segment
        ([[0, 1]], (0, 3, 0)),  # a segment without rows
        ([[0, 1]], (1, 1, 0)),
        ([[0, 1]], (0, 2, -1)),
        ([[0, 1]], (0, 2, 2**62)),
        ([[0, 1]], (0, 2**62, 2**62)),
        ([[0, 1]], (0, -(2**63), 0)),
    ):
        with pytest.raises(ExecutionError, match="kernel argument"):
            kernels.attention(q, k_pages, v_pages, np.array(table_, np.int32), np.array([segment], np.int64))


@every_variant
def test_no_rows_is_legal(kernels: Kernels) -> None:
    empty = np.zeros((0, 16), np.float32)
    u, scale = kernels.quantise(empty)
    assert u.shape == (0, 16) and scale.shape == (0,)
    pages = np.zeros((1, 1, 8, PAGE), np.float16)
    out = kernels.attention(
        np.zeros((0, 2, 8), np.float32), pages, pages.reshape(1, 1, PAGE, 8),
        np.zeros((0, 1), np.int32), np.zeros((0, 3), np.int64),
    )  # fmt: skip
    assert out.shape == (0, 16)


def test_the_variants_of_a_cpu_begin_with_the_fastest() -> None:
    assert isas_for(AVX2 | AVX512 | VNNI | TILES) == ("amx", "avx512vnni", "avx512", "avx2", "baseline")
    assert isas_for(AVX2 | AVX512 | VNNI) == ("avx512vnni", "avx512", "avx2", "baseline")
    assert isas_for(AVX2 | AVX512) == ("avx512", "avx2", "baseline")
    assert isas_for(AVX2 | VNNI) == ("avx2", "baseline"), "AVX512-VNNI is used with AVX-512 only"
    assert isas_for(AVX2 | AVX_VNNI) == ("avxvnni", "avx2", "baseline")
    assert isas_for(AVX2 | AVX512 | VNNI | TILES | AVX_VNNI)[:3] == ("amx", "avx512vnni", "avxvnni")
    assert isas_for(SDOT | SMMLA) == ("i8mm", "dotprod", "baseline")
    assert isas_for(SDOT) == ("dotprod", "baseline")
    assert isas_for(SMMLA) == ("baseline",), "SMMLA is used beside SDOT only"
    assert isas_for(0) == ("baseline",)


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="compares with /proc/cpuinfo")
def test_features_are_those_that_the_system_names() -> None:
    flags = set(cpu_facts().get("flags", "").split())
    needed = {
        AVX2: {"avx2", "fma", "f16c"},
        AVX512: {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
        VNNI: {"avx512_vnni"},
        AVX_VNNI: {"avx_vnni"},
    }
    found = cpu_features()
    assert found & ~TILES == sum(feature for feature, names in needed.items() if names <= flags)
    assert not found & TILES or {"amx_tile", "amx_int8"} <= flags  # the system may forbid them


def test_the_fastest_variant_is_taken_unless_another_is_named() -> None:
    assert load_kernels(1).isa == supported_isas()[0]
    assert load_kernels(1, isa="reference").isa == "reference"
    assert load_kernels(1, isa="baseline").isa == "baseline"
    with pytest.raises(UsageError, match="'sse9' cannot run here"):
        load_kernels(1, isa="sse9")
    with pytest.raises(UsageError, match="at least one thread"):
        load_kernels(0)


def test_without_native_kernels_the_reference_serves_and_says_that_it_is_slow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels_module, "supported_isas", lambda: ())
    monkeypatch.setattr(kernels_module, "shortcoming", lambda: "slower, for want of a compiler")
    with caplog.at_level(logging.WARNING):
        assert load_kernels(1).isa == "reference"
    assert "slower" in caplog.text and "compiler" in caplog.text

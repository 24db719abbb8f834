"""The rotary tables: frequencies bit for bit those of transformers, cosines rounded once."""

import math
from pathlib import Path

import numpy as np
import pytest

from blockrelay_converter.checkpoint.config import Rotary
from blockrelay_converter.rotary import inverse_frequencies, rotation_of, write_rotary

PAIRS = (0, 20, 28, 30, 34, 36, 63)
"""Pairs of a head of 128 where llama3 scaling leaves alone (0 to 28), smooths (30, 34) and divides (36, 63)."""

# From LlamaRotaryEmbedding of transformers 5.23, rope_theta 500000, head_dim 128.
PLAIN = (
    "0x1.0p+0",
    "0x1.0f5386p-6",
    "0x1.a4ee4p-9",
    "0x1.175482p-9",
    "0x1.ec07d4p-11",
    "0x1.46831ap-11",
    "0x1.4985fep-19",
)
LINEAR = (
    "0x1.0p-2",
    "0x1.0f5386p-8",
    "0x1.a4ee4p-11",
    "0x1.175482p-11",
    "0x1.ec07d4p-13",
    "0x1.46831ap-13",
    "0x1.4985fep-21",
)
LLAMA3 = (
    "0x1.0p+0",
    "0x1.0f5386p-6",
    "0x1.a4ee4p-9",
    "0x1.67a23ap-10",
    "0x1.765ba4p-13",
    "0x1.46831ap-14",
    "0x1.4985fep-22",
)


@pytest.mark.parametrize(
    ("rotary", "expected"),
    [
        (Rotary(type="default", theta=500000.0), PLAIN),
        (Rotary(type="linear", theta=500000.0, factor=4.0), LINEAR),
        (
            Rotary(
                type="llama3",
                theta=500000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position=8192,
            ),
            LLAMA3,
        ),
    ],
    ids=lambda value: value.type if isinstance(value, Rotary) else "",
)
def test_frequencies_are_those_of_transformers(rotary: Rotary, expected: tuple[str, ...]) -> None:
    found = inverse_frequencies(rotary, 128)
    assert found.dtype == np.float32
    assert [float(found[pair]) for pair in PAIRS] == [float.fromhex(value) for value in expected]


@pytest.mark.parametrize("head_dim", [8, 24, 128])
def test_tables_hold_the_cosine_and_sine_of_position_times_frequency(head_dim: int, tmp_path: Path) -> None:
    positions = 4099  # more than one chunk
    rotary = Rotary(type="default", theta=10000.0)
    write_rotary(tmp_path / "rotary.bin", rotation_of(rotary, head_dim), max_position=positions)
    cos, sin = np.fromfile(tmp_path / "rotary.bin", "<f4").reshape(2, positions, head_dim // 2)

    frequencies = inverse_frequencies(rotary, head_dim)
    for position in (0, 1, 17, 4095, 4096, 4098):
        for pair in (0, head_dim // 4, head_dim // 2 - 1):
            angle = float(np.float32(position) * frequencies[pair])
            assert cos[position, pair] == pytest.approx(math.cos(angle), abs=1e-7)
            assert sin[position, pair] == pytest.approx(math.sin(angle), abs=1e-7)

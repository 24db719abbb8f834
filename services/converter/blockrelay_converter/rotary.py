"""Computes the rotary tables, which ship with the model so that no worker evaluates a cosine (libm differs).

The formulas and their float32 steps are those of transformers (`modeling_rope_utils.py`), so that fp32 agrees with it.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blockrelay_converter.checkpoint.config import Rotary

F32 = NDArray[np.float32]
_CHUNK_POSITIONS = 4096


def inverse_frequencies(rotary: Rotary, head_dim: int) -> F32:
    """Returns the radians per position of each pair of dimensions (d, d + head_dim/2), float32 [head_dim/2]."""
    one = np.float32(1.0)
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = one / np.power(np.float64(rotary.theta), exponents.astype(np.float64)).astype(np.float32)
    if rotary.factor is None:
        return plain
    factor = np.float32(rotary.factor)
    if rotary.type == "linear":
        return plain / factor
    assert rotary.low_freq_factor is not None
    assert rotary.high_freq_factor is not None
    assert rotary.original_max_position is not None
    low, high, old_context = rotary.low_freq_factor, rotary.high_freq_factor, rotary.original_max_position
    wavelength = np.float32(2 * math.pi) / plain
    slow = np.where(wavelength > np.float32(old_context / low), plain / factor, plain)
    smooth = (np.float32(old_context) / wavelength - np.float32(low)) / np.float32(high - low)
    smoothed = (one - smooth) * slow / factor + smooth * slow
    medium = (wavelength >= np.float32(old_context / high)) & (wavelength <= np.float32(old_context / low))
    return np.where(medium, smoothed, slow).astype(np.float32)


PairTables = tuple[F32, F32]
"""The tables of cos and sin, float32 [positions, head_dim / 2] each."""


@dataclass(frozen=True, slots=True)
class FrequencyRotation:
    """A rotation by frequencies: radians per position, float32 [head_dim / 2]. `factor` multiplies cos and sin."""

    frequencies: F32
    factor: np.float32

    def tables(self, first: int, stop: int) -> PairTables:
        """Returns the tables for positions `first` to `stop - 1`."""
        positions = np.arange(first, stop, dtype=np.float32)
        angles = positions[:, None] * self.frequencies  # rounded to float32, as in the reference
        wide = angles.astype(np.float64)
        return np.cos(wide).astype(np.float32) * self.factor, np.sin(wide).astype(np.float32) * self.factor


@dataclass(frozen=True, slots=True)
class TableRotation:
    """A rotation by tables of cos and sin, float32 [positions, head_dim / 2] each."""

    cos: F32
    sin: F32

    def tables(self, first: int, stop: int) -> PairTables:
        """Returns the tables for positions `first` to `stop - 1`, or as many of these as they have."""
        return self.cos[first:stop], self.sin[first:stop]


Rotation = FrequencyRotation | TableRotation


def rotation_of(rotary: Rotary, head_dim: int) -> FrequencyRotation:
    """Returns the rotation of a checkpoint."""
    return FrequencyRotation(inverse_frequencies(rotary, head_dim), np.float32(1.0))


def write_rotary(path: Path, rotation: Rotation, *, max_position: int) -> None:
    """Writes the cos table, then the sin table, to `path`: little-endian float32 [max_position, head_dim/2] each.

    A TableRotation must have `max_position` positions or more.
    """
    with path.open("wb") as file:
        for which in (0, 1):
            for start in range(0, max_position, _CHUNK_POSITIONS):
                tables = rotation.tables(start, min(start + _CHUNK_POSITIONS, max_position))
                file.write(tables[which].astype("<f4").tobytes())

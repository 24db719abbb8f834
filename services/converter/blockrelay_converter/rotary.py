"""Computes the rotary tables, which ship with the model so that no worker evaluates a cosine (libm differs).

The formulas and their float32 steps are those of transformers (`modeling_rope_utils.py`), so that fp32 agrees with it.
"""

import math
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from blockrelay_converter.checkpoint.config import Rotary

_CHUNK_POSITIONS = 4096


def inverse_frequencies(rotary: Rotary, head_dim: int) -> NDArray[np.float32]:
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


PairTables = tuple[NDArray[np.float32], NDArray[np.float32]]
"""The tables of cos and sin, float32 [positions, head_dim / 2] each."""


class Rotation(Protocol):
    """The rotation of a model whose weights do not come from a checkpoint."""

    def tables(self, first: int, stop: int) -> PairTables:
        """Returns the tables for positions `first` to `stop - 1`."""
        ...


def tables_of_frequencies(frequencies: NDArray[np.float32], *, first: int, stop: int) -> PairTables:
    """Returns the tables for positions `first` to `stop - 1`; `frequencies` are those of `inverse_frequencies`."""
    positions = np.arange(first, stop, dtype=np.float32)
    angles = positions[:, None] * frequencies  # rounded to float32, as in the reference
    wide = angles.astype(np.float64)
    return np.cos(wide).astype(np.float32), np.sin(wide).astype(np.float32)


def rotary_tables(rotary: Rotary, *, head_dim: int, first: int, stop: int) -> PairTables:
    """Returns the tables of a checkpoint's rotation for positions `first` to `stop - 1`."""
    return tables_of_frequencies(inverse_frequencies(rotary, head_dim), first=first, stop=stop)


def write_rotary(path: Path, rotary: Rotary | Rotation, *, head_dim: int, max_position: int) -> None:
    """Writes the cos table, then the sin table, to `path`: little-endian float32 [max_position, head_dim/2] each."""
    with path.open("wb") as file:
        for which in (0, 1):
            for start in range(0, max_position, _CHUNK_POSITIONS):
                stop = min(start + _CHUNK_POSITIONS, max_position)
                if isinstance(rotary, Rotary):
                    tables = rotary_tables(rotary, head_dim=head_dim, first=start, stop=stop)
                else:
                    tables = rotary.tables(start, stop)
                file.write(tables[which].astype("<f4").tobytes())

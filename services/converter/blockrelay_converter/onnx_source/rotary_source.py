"""Reads the rotary embedding of ONNX blocks and gives its tables of cos and sin for a range of positions."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockrelay.onnx_blocks.llama.model import Frequencies, Tables
from blockrelay_converter.onnx_source.files import OnnxBlocks
from blockrelay_converter.rotary import PairTables, tables_of_frequencies

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class OfFrequencies:
    """A rotation by frequencies: radians per position, float32 [head_dim / 2]. `factor` multiplies cos and sin."""

    frequencies: F32
    factor: np.float32

    def tables(self, first: int, stop: int) -> PairTables:
        """Returns the tables for positions `first` to `stop - 1`."""
        cos, sin = tables_of_frequencies(self.frequencies, first=first, stop=stop)
        return cos * self.factor, sin * self.factor


@dataclass(frozen=True, slots=True)
class OfTables:
    """A rotation by the tables of cos and sin in a graph, float32 [positions, head_dim / 2] each."""

    cos: F32
    sin: F32

    def tables(self, first: int, stop: int) -> PairTables:
        """Returns the tables for positions `first` to `stop - 1`."""
        return self.cos[first:stop], self.sin[first:stop]


def rotary_of(blocks: OnnxBlocks, rotary: Frequencies | Tables, head_dim: int) -> OfFrequencies | OfTables:
    """Returns the rotation of the recognised model. Raises OnnxBlocksError for tables that are no rotation."""
    if isinstance(rotary, Frequencies):
        frequencies = blocks.array(rotary.constant).astype(np.float32).reshape(-1)
        return OfFrequencies(frequencies, np.float32(rotary.factor))
    cos, sin = (blocks.array(one)[:, : head_dim // 2].astype(np.float32) for one in (rotary.cos, rotary.sin))
    if not cos[0].any():  # at position 0 all cosines are 1 times a factor: zeros mean that the tables are swapped
        cos, sin = sin, cos
    if cos.shape != sin.shape or sin[0].any() or not cos[0].all():
        raise rotary.cos.error(f"and {rotary.sin.name} are not the cosines and sines of positions from 0 on")
    return OfTables(cos, sin)

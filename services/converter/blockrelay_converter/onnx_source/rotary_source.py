"""The rotation that ONNX blocks bring, as tables of cos and sin for any positions."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.llama.model import Frequencies, Tables
from blockrelay_converter.onnx_source.files import OnnxBlocks
from blockrelay_converter.rotary import PairTables, tables_of_frequencies

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class OfFrequencies:
    """Radians per position, float32 [head_dim / 2]; cos and sin are multiplied by `factor`."""

    frequencies: F32
    factor: np.float32

    def tables(self, first: int, stop: int) -> PairTables:
        """See `Rotation`."""
        cos, sin = tables_of_frequencies(self.frequencies, first=first, stop=stop)
        return cos * self.factor, sin * self.factor


@dataclass(frozen=True, slots=True)
class OfTables:
    """Cos and sin as a graph has them, float32 [positions, head_dim / 2]."""

    cos: F32
    sin: F32

    def tables(self, first: int, stop: int) -> PairTables:
        """See `Rotation`."""
        return self.cos[first:stop], self.sin[first:stop]


def rotary_of(blocks: OnnxBlocks, rotary: Frequencies | Tables, head_dim: int) -> OfFrequencies | OfTables:
    """Raises OnnxBlocksError for tables that are none of a rotation."""
    if isinstance(rotary, Frequencies):
        frequencies = blocks.array(rotary.constant).astype(np.float32).reshape(-1)
        return OfFrequencies(frequencies, np.float32(rotary.factor))
    cos, sin = (blocks.array(one)[:, : head_dim // 2].astype(np.float32) for one in (rotary.cos, rotary.sin))
    if not cos[0].any():  # position 0 turns nothing: its cosines are 1, times a factor
        cos, sin = sin, cos
    if cos.shape != sin.shape or sin[0].any() or not cos[0].all():
        raise OnnxBlocksError(
            f"and {rotary.sin.name} are not the cosines and sines of positions from 0 on",
            file=rotary.cos.file,
            tensor=rotary.cos.name,
        )
    return OfTables(cos, sin)

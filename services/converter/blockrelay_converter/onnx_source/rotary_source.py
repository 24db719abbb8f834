"""Reads the rotary embedding of ONNX blocks."""

import numpy as np

from blockrelay.onnx_blocks.llama.model import Frequencies, RotationTables
from blockrelay_converter.onnx_source.files import OnnxBlocks
from blockrelay_converter.rotary import FrequencyRotation, Rotation, TableRotation


def rotary_of(blocks: OnnxBlocks, rotary: Frequencies | RotationTables, head_dim: int) -> Rotation:
    """Returns the rotation of the recognised model: its frequencies, or its tables cut to head_dim / 2 columns.

    Swapped tables of cos and sin are put right. Raises OnnxBlocksError for tables of different shapes. Raises it also
    unless at position 0, the only one that is checked, all sines are 0 and no cosine is.
    """
    if isinstance(rotary, Frequencies):
        frequencies = blocks.array(rotary.constant).astype(np.float32).reshape(-1)
        return FrequencyRotation(frequencies, np.float32(rotary.factor))
    cos, sin = (blocks.array(one)[:, : head_dim // 2].astype(np.float32) for one in (rotary.cos, rotary.sin))
    if not cos[0].any():  # at position 0 all cosines are 1 times a factor: zeros mean that the tables are swapped
        cos, sin = sin, cos
    if cos.shape != sin.shape or sin[0].any() or not cos[0].all():
        raise rotary.cos.error(f"and {rotary.sin.name} are not the cosines and sines of positions from 0 on")
    return TableRotation(cos, sin)

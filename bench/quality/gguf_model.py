"""Reads a GGUF file through the package `gguf`: its metadata, and its tensors in float32."""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import UsageError

#: The types of tensors that are read.
KINDS = ("F32", "Q8_0", "Q4_1")
#: The type whose groups of weights have 16 values each, evenly apart.
GRID, GROUP, STEPS = "Q4_1", 32, 15
Tensor = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """A GGUF file: its metadata by key, and its tensors as the package `gguf` describes them."""

    metadata: Mapping[str, Any]
    descriptions: tuple[Any, ...]
    off_grid: bool = False
    """Whether weights of 4 bits are moved off their grid (see `off_grid`)."""

    def names(self) -> set[str]:
        """Returns the names of all tensors."""
        return {one.name for one in self.descriptions}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and float32 values of each tensor; matrices are [outputs, inputs]."""
        for one in self.descriptions:
            values = np.asarray(_library().quants.dequantize(one.data, one.tensor_type), np.float32)
            moved = self.off_grid and one.tensor_type.name == GRID
            yield one.name, off_grid(values, seed=zlib.crc32(one.name.encode())) if moved else values


def off_grid(matrix: Tensor, *, seed: int) -> Tensor:
    """Returns weights of 4 bits, each moved at random by up to half a step of its group's grid.

    Weights that were never rounded lie anywhere. A format of 4 bits can give weights on a grid again without any error,
    which it cannot do for a model of 16 bits.
    """
    groups = matrix.reshape(-1, GROUP)
    steps = (groups.max(1, keepdims=True) - groups.min(1, keepdims=True)) / STEPS
    moves = np.random.default_rng(seed).random(groups.shape, np.float32) - np.float32(0.5)
    return (groups + steps * moves).reshape(matrix.shape)


def read(path: Path, *, moved: bool = False) -> GgufModel:
    """Returns the model in the file `path`; with `moved` its weights are off their grid.

    Raises UsageError if the package `gguf` is not installed, and for a file that is not GGUF or has tensors of other
    types than KINDS.
    """
    try:
        reader = _library().GGUFReader(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: is no GGUF file: {error}") from error
    for one in reader.tensors:
        if one.tensor_type.name not in KINDS:
            raise UsageError(f"{path}: {one.name} is {one.tensor_type.name}; {', '.join(KINDS)} are read")
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    return GgufModel(metadata=metadata, descriptions=tuple(reader.tensors), off_grid=moved)


def _library() -> Any:
    try:
        return import_module("gguf")
    except ImportError as error:
        raise UsageError("the package gguf is not installed: `make quality` installs it") from error

"""Reads a GGUF file through the package `gguf`: its metadata, and its tensors in float32."""

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
Tensor = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """A GGUF file: its metadata by key, and its tensors as the package `gguf` describes them."""

    metadata: Mapping[str, Any]
    descriptions: tuple[Any, ...]

    def names(self) -> set[str]:
        """Returns the names of all tensors."""
        return {one.name for one in self.descriptions}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and float32 values of each tensor; matrices are [outputs, inputs]."""
        for one in self.descriptions:
            yield one.name, np.asarray(_library().quants.dequantize(one.data, one.tensor_type), np.float32)


def read(path: Path) -> GgufModel:
    """Returns the model in the file `path`.

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
    return GgufModel(metadata=metadata, descriptions=tuple(reader.tensors))


def _library() -> Any:
    try:
        return import_module("gguf")
    except ImportError as error:
        raise UsageError("the package gguf is not installed: `make quality` installs it") from error

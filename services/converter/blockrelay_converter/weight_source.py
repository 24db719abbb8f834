"""Protocols of a source of weights: a checkpoint, or ONNX blocks. Tensors have the names that checkpoints give."""

from collections.abc import Set as AbstractSet
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

F32, F64 = NDArray[np.float32], NDArray[np.float64]
#: The weights of a linear layer in w4a8: q4 [K/2, N], gs [K/32, N] and gm [K/32, N] (`model.block_tensors`).
Groups = tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]


class SourceTensor(Protocol):
    """One tensor of floats, read a few rows at a time. `name` is for messages."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Returns a copy of rows `start` to `stop - 1` of the first axis.

        Raises UsageError or OnnxBlocksError if a value is not finite.
        """
        ...

    def groups(self, start: int, stop: int) -> Groups | None:
        """Returns the same rows in w4a8 if the source stores them so that nothing has to be rounded, else None."""
        ...

    def forget(self) -> None:
        """Releases memory; the tensor may be read again."""
        ...


class WeightSource(Protocol):
    """All tensors of a model."""

    def names(self) -> AbstractSet[str]:
        """Returns the names of all tensors."""
        ...

    def tensor(self, name: str, shape: tuple[int, ...]) -> SourceTensor:
        """Returns the tensor `name`. Raises UsageError or OnnxBlocksError if its shape is not `shape`.

        A checkpoint also raises UsageError for a tensor that it lacks or cannot read. ONNX blocks need one of `names`.
        """
        ...

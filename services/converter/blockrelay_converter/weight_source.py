"""What a model's weights are read from: a checkpoint, or ONNX blocks. Tensors have the names that checkpoints give."""

from collections.abc import Set as AbstractSet
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

#: Of a linear layer in w4a8: q4 [K/2, N], gs [K/32, N] and scale [N] (`model.block_tensors`).
Groups = tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float32]]


class SourceTensor(Protocol):
    """Float numbers, read a few rows at a time. `name` is for people."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """A copy of rows `start` to `stop` of the first axis. UsageError or OnnxBlocksError if one is not finite."""
        ...

    def groups(self, start: int, stop: int) -> Groups | None:
        """The same rows as w4a8 has them, if the source has them just so."""
        ...

    def forget(self) -> None:
        """Give memory back; reading again is allowed."""
        ...


class WeightSource(Protocol):
    """All tensors of a model."""

    def names(self) -> AbstractSet[str]:
        """Every tensor name."""
        ...

    def tensor(self, name: str, shape: tuple[int, ...]) -> SourceTensor:
        """The tensor `name`, which must have `shape`. UsageError or OnnxBlocksError names the tensor if not."""
        ...

"""Reports of `blockrelay split`: the worker sends a SplitBegins, then a SplitWrites for each piece that is written."""

from dataclasses import dataclass
from typing import Literal

#: Where the weights of the blocks are: in their files, as they were in the model's; in the model's weight files, under
#: second names (hard links); in copies of these; or each block's in a file of its own.
Weights = Literal["inside", "linked", "copied", "cut"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBlock:
    """One block of the plan."""

    file: str
    nodes: int
    """Number of operators in its graph."""
    border: tuple[str, ...]
    """Names of the tensors that it gets from earlier blocks."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weight_bytes: int
    """Bytes of the weights that it uses, wherever they are stored."""


@dataclass(frozen=True, slots=True)
class SplitBegins:
    """The first report."""

    blocks: tuple[SplitBlock, ...]
    weights: Weights
    bytes: int
    """Bytes of all files that the split writes, with what an earlier, interrupted run has left."""


@dataclass(frozen=True, slots=True)
class SplitWrites:
    """Progress: `bytes` more of `file` are written."""

    file: str
    bytes: int

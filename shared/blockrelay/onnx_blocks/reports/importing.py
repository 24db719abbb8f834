"""Reports of `blockrelay import`: from the converter to the launcher, and between the converter and the worker.

The converter sends an ImportReport for each step and one for the result. It has the worker compare the import with the
original graphs: the worker gets a ComparedPlaces and sends a ComparedBlock for each block.
"""

from dataclasses import dataclass

from blockrelay.onnx_blocks.llama.graph import TensorPlace
from blockrelay.onnx_blocks.llama.model import RowPlaces


@dataclass(frozen=True, slots=True)
class ComparedPlaces:
    """The tensors of the original graphs that are compared with the import."""

    layers: tuple[RowPlaces, ...]
    """The places of each layer's results, in the order of the layers."""
    logits: TensorPlace


@dataclass(frozen=True, slots=True)
class ComparedBlock:
    """The result of comparing one imported block with its original."""

    block: str
    errors: dict[str, float]
    """Distance of the worst row from the original's, as a share of the allowed distance, by what was compared: `hidden
    rows`, `keys`, `values`, `logits`."""
    problem: str = ""
    """Why the block is not near enough; empty if it is."""


@dataclass(frozen=True, slots=True)
class ImportStep:
    """Progress of an import."""

    what: str
    """What the converter does now."""
    bytes: int
    """Bytes that are done since the report before."""
    total: int
    """Bytes of the whole import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """The folder that was written."""

    name: str
    family: str
    precision: str
    stored: str
    """The precision that needs no rounding."""
    blocks: int
    """Number of blocks."""
    bytes: int
    """Bytes of all files in the folder's manifest."""
    compared: tuple[ComparedBlock, ...]
    cost: float | None
    """The share by which perplexity is above that of the stored precision; None: not measured."""
    notes: tuple[str, ...]
    """What was missing, assumed or widened, each a sentence."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """One report of the converter: a step, or the result. The other one is None."""

    step: ImportStep | None = None
    result: ImportResult | None = None

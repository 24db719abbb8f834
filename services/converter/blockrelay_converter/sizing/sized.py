"""Sizes a model under a load, for `analyse --sizing` and the tables of docs/sizing.md. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from blockrelay.block_folder.analysis import ModelAnalysis, analyse
from blockrelay.block_folder.model import ModelConfig, Precision
from blockrelay.errors import UsageError
from blockrelay_converter.sizing.capacity import Capacity, ExpectedLoad, ModelNeed, capacity, model_need
from blockrelay_converter.sizing.pace import Paces


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A model under a load, and its needs at the slowest and the fastest likely pace (equal if the pace is known)."""

    name: str
    precisions: tuple[Precision, ...]
    load: ExpectedLoad
    model: ModelNeed
    paces: Paces
    slow: Capacity
    fast: Capacity


def size(
    model: ModelConfig,
    precisions: Sequence[Precision],
    load: ExpectedLoad,
    pace: Callable[[ModelAnalysis], Paces],
) -> Sized:
    """Sizes the model and the load at both ends of the range that `pace` returns for the model's analysis.

    `precisions` has one entry for each block. Raises UsageError for a context beyond the model's, for ONNX blocks made
    by others, for more stages than blocks, and for a precision that the model's widths do not allow. Errors of `pace`
    pass through.
    """
    if load.context > model.max_position:
        raise UsageError(f"--context {load.context} is beyond the {model.max_position} of {model.name}")
    analysis = analyse(replace(model, max_position=load.context))
    need = model_need(analysis, precisions, load, head_dim=model.head_dim)
    paces = pace(analysis)
    return Sized(
        name=model.name,
        precisions=tuple(precisions),
        load=load,
        model=need,
        paces=paces,
        slow=capacity(need, load, paces.slow),
        fast=capacity(need, load, paces.fast),
    )

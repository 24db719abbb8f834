"""A model of a shape under a load, sized: what `analyse --sizing` prints and docs/sizing.md is made of. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from blockrelay.block_folder.analysis import ModelAnalysis, analyse
from blockrelay.block_folder.model import ModelConfig, Precision
from blockrelay.errors import UsageError
from blockrelay_converter.sizing.capacity import Capacity, Load, ModelNeed, capacity, model_need
from blockrelay_converter.sizing.pace import Paces


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A model under a load, and what it needs at the two ends of its paces, which are one where the pace is known."""

    name: str
    precisions: tuple[Precision, ...]
    load: Load
    model: ModelNeed
    paces: Paces
    slow: Capacity
    fast: Capacity


def size(
    model: ModelConfig,
    precisions: Sequence[Precision],
    load: Load,
    pace: Callable[[ModelAnalysis], Paces],
) -> Sized:
    """The model and the load, sized at both ends of the pace. UsageError for a context that the model does not have,
    and what `analyse` and `model_need` refuse."""
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

"""Turns the options of `blockrelay analyse --sizing` into a sized model: defaults, checks and reading of files."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from blockrelay.block_folder.analysis import ModelAnalysis
from blockrelay.block_folder.precisions import DEFAULT_PRECISION, parse_precisions
from blockrelay.errors import UsageError
from blockrelay.planning.profile import read_profile_file
from blockrelay_converter.sizing.capacity import ExpectedLoad
from blockrelay_converter.sizing.pace import Paces, given_pace, profiled_pace, scaled_pace
from blockrelay_converter.sizing.shapes import read_shape
from blockrelay_converter.sizing.sized import Sized, size

_Value = TypeVar("_Value")
#: Defaults of the options: tokens, requests per second, requests at once, cores. CONTEXT is cut to the model's context,
#: PROMPT to half of the context, and NEW to a quarter of it.
PRECISION, CONTEXT, PROMPT, NEW, REQUESTS_PER_SECOND, AT_ONCE, CORES = DEFAULT_PRECISION, 8192, 512, 256, 1.0, 64, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingOptions:
    """The options of `analyse --sizing`; None: not given.

    `context`, `prompt` and `new` are tokens of one request, and `cores` are those of one worker. `precision` is text
    such as `w8a8,block_33=fp32`, and `device` a class of devices in the file `profile`.
    """

    precision: str | None
    context: int | None
    requests_per_second: float | None
    prompt: int | None
    new: int | None
    stages: int | None
    requests_at_once: int | None
    tokens_per_second_per_worker: float | None
    profile: Path | None
    device: str | None
    cores: int | None

    def given(self) -> list[str]:
        """Returns the names of the options that were given, as on the command line."""
        return [f"--{name.replace('_', '-')}" for name in self.__slots__ if getattr(self, name) is not None]


def sized_by(model: str, wishes: SizingOptions) -> Sized:
    """Returns the model and its load, sized by the options.

    `model` is a block folder, a checkpoint or a shape's name. Raises UsageError, UnsupportedModel or BlockFolderError
    for a model or options that cannot be sized.
    """
    shape, converted = read_shape(model)
    if wishes.precision is None and converted is not None:
        precisions = converted
    else:
        precisions = parse_precisions(wishes.precision or PRECISION, shape.blocks)
    context = min(CONTEXT, shape.max_position) if wishes.context is None else wishes.context
    load = ExpectedLoad(
        requests_per_second=_or(wishes.requests_per_second, REQUESTS_PER_SECOND),
        prompt=_or(wishes.prompt, min(PROMPT, max(1, context // 2))),
        new=_or(wishes.new, min(NEW, max(1, context // 4))),
        context=context,
        stages=_or(wishes.stages, 1),
        at_once=_or(wishes.requests_at_once, AT_ONCE),
    )
    known = [name for name in ("--tokens-per-second-per-worker", "--profile", "--cores") if name in wishes.given()]
    if len(known) > 1:
        raise UsageError(f"{' and '.join(known)} say the same thing twice: how fast a worker is")
    if wishes.device is not None and wishes.profile is None:
        raise UsageError("--device says which of a profile's devices is meant: give --profile too")
    profile = None if wishes.profile is None else read_profile_file(wishes.profile)

    def pace(analysis: ModelAnalysis) -> Paces:
        if wishes.tokens_per_second_per_worker is not None:
            return given_pace(wishes.tokens_per_second_per_worker)
        if profile is not None:
            return profiled_pace(profile, load, blocks=shape.blocks, device=wishes.device)
        return scaled_pace(analysis, precisions, load, cores=_or(wishes.cores, CORES))

    return size(shape, precisions, load, pace)


def _or(value: _Value | None, otherwise: _Value) -> _Value:
    return otherwise if value is None else value

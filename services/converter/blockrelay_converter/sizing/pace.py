"""Computes the pace of a route of workers under a load: as given, from a profile, or a range. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from blockrelay.block_folder.analysis import ModelAnalysis
from blockrelay.block_folder.model import Precision
from blockrelay.errors import UsageError
from blockrelay.planning.profile import BlockProfile, Profile
from blockrelay.protocol.planned_split import equal_parts
from blockrelay_converter.sizing.capacity import ExpectedLoad
from blockrelay_converter.sizing.measured import CORE_OPERATIONS, PACE_FACTOR, PRECISION_PACE

#: Tokens of a step that reads prompts; the profile's time for this many is used for all of a prompt.
PROMPT_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Paces:
    """The slowest and the fastest likely pace, and the name of their source in `measured.SOURCES`.

    A pace is the new tokens per second of one route (one worker per stage) while it also computes the load's prompts.
    """

    slow: float
    fast: float
    source: str


def given_pace(tokens_per_second: float) -> Paces:
    """Returns the pace that the user gave. Raises UsageError for an impossible number."""
    if not 0 < tokens_per_second < 1e9:
        raise UsageError("--tokens-per-second-per-worker must be above 0, and what a worker can have")
    return Paces(slow=tokens_per_second, fast=tokens_per_second, source="given")


def scaled_pace(analysis: ModelAnalysis, precisions: Sequence[Precision], load: ExpectedLoad, *, cores: int) -> Paces:
    """Returns the likely range of paces of a route of CPU workers with `cores` cores each.

    It follows from the model's operations and the measured speed of a core, PACE_FACTOR slower and faster.
    `precisions` has one entry per block. Raises UsageError for `cores` outside 1 to 4096.
    """
    if not 0 < cores <= 4096:
        raise UsageError("--cores must be 1 to 4096, those of one worker")
    seconds = 0.0
    attended = (load.prompt + load.new) ** 2 / 2  # tokens attended to, summed over all positions of a request
    for block, precision in zip(analysis.blocks, precisions, strict=True):
        rows = load.prompt + load.new if block.layers else load.new  # the head runs only at positions that give tokens
        operations = rows * block.flops_per_row + attended * block.attention_flops
        seconds += operations / (CORE_OPERATIONS.value * PRECISION_PACE[precision])
    tokens = load.new / seconds * cores * load.stages
    return Paces(slow=tokens / PACE_FACTOR, fast=tokens * PACE_FACTOR, source="not profiled")


def profiled_pace(profile: Profile, load: ExpectedLoad, *, blocks: int, device: str | None) -> Paces:
    """Returns the pace that follows from a profile of the model's blocks: the slowest stage bounds the route.

    `device` is the class in the profile, which may be None if it has only one. Raises UsageError for a profile with
    other blocks than 1 to `blocks`, for an unknown or missing class, and for more stages than blocks.
    """
    if len(profile.blocks) != blocks or set(profile.blocks) != {f"block_{index}" for index in range(1, blocks + 1)}:
        raise UsageError(
            f"the profile has {len(profile.blocks)} blocks and the model {blocks}: profile this model with "
            "`blockrelay profile`"
        )
    classes = [one for one in profile.classes if device in (None, one)]
    if len(classes) != 1:
        named = " and ".join(profile.classes) or "no class of device for every block"
        raise UsageError(f"the profile has {named}: choose one with --device")
    of_class = [profile.blocks[f"block_{index}"][classes[0]] for index in range(1, blocks + 1)]
    slowest = max(
        _request_seconds(profile, of_class[part.first - 1 : part.last], load, has_head=part.last == blocks)
        for part in equal_parts(blocks, load.stages).stages
    )
    return Paces(slow=load.new / slowest, fast=load.new / slowest, source="profiled")


def _request_seconds(profile: Profile, blocks: Sequence[BlockProfile], load: ExpectedLoad, *, has_head: bool) -> float:
    """Returns the seconds that a stage computes for one request, in steps shared with `load.at_once` requests."""
    context = load.prompt + load.new / 2
    layers = blocks[:-1] if has_head else blocks
    reading = sum(block.at(PROMPT_ROWS, load.prompt / 2) for block in layers) / PROMPT_ROWS
    step = sum(block.at(load.at_once, context) for block in blocks)
    step += profile.step.seconds + load.at_once * profile.step.seconds_per_row
    return load.prompt * reading + load.new * step / load.at_once

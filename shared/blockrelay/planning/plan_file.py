"""The split that a scheduler publishes: equal parts, or what `blockrelay plan --json` wrote into a file."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from blockrelay.errors import UsageError
from blockrelay.protocol.plan import Stage, uniform_split

_BLOCKS = re.compile(r"([0-9]{1,6})-([0-9]{1,6})")
_MAX_BYTES = 16 << 20
_MAX_REASON = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSplit:
    """Stages that cover all blocks, and why each of them has these."""

    stages: tuple[Stage, ...]
    reasons: tuple[str, ...]


def equal_parts(blocks: int, stages: int) -> PlannedSplit:
    """As many equal parts. UsageError for more than there are blocks, or none."""
    split = uniform_split(blocks, stages)
    sizes = [stage.last - stage.first + 1 for stage in split]
    why = ["the whole model" if stages == 1 else f"{size} of {blocks} blocks in {stages} equal parts" for size in sizes]
    return PlannedSplit(stages=split, reasons=tuple(why))


def read_plan_file(path: Path, blocks: int) -> PlannedSplit:
    """The stages in a file of `blockrelay plan --json`, for a model of `blocks` blocks.

    UsageError, one line that names the file: it cannot be read, is no plan, or its stages do not cover these blocks.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    if len(content) > _MAX_BYTES:
        raise UsageError(f"{path}: larger than {_MAX_BYTES >> 20} MiB")
    try:
        entries = cast(list[dict[str, Any]], json.loads(content)["stages"])
        found = [_stage(entry) for entry in entries]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(f"{path}: not what `blockrelay plan --json` writes: stages with their blocks") from None
    expected = 1
    for stage, _ in found:
        if stage.first != expected or stage.last < stage.first:
            raise UsageError(f"{path}: stage {stage.first}-{stage.last} does not continue at block_{expected}")
        expected = stage.last + 1
    if expected != blocks + 1:
        raise UsageError(f"{path}: a plan of {expected - 1} blocks, but the model has {blocks}")
    return PlannedSplit(stages=tuple(stage for stage, _ in found), reasons=tuple(why for _, why in found))


def _stage(entry: dict[str, Any]) -> tuple[Stage, str]:
    """A stage of the file and why it is so. Raises ValueError, KeyError or TypeError for something else."""
    blocks = _BLOCKS.fullmatch(entry["blocks"])
    if blocks is None:
        raise ValueError
    devices = entry.get("devices") or [entry.get("device", "any device")]
    why = f"planned for {' and '.join(map(str, devices))}"
    if reason := entry.get("reason"):
        why += f" ({reason})"
    return Stage(first=int(blocks[1]), last=int(blocks[2])), " ".join(why.split())[:_MAX_REASON]

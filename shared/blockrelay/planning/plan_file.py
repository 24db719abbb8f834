"""Reads a plan from a file, for schedulers, `up` and `plan apply`.

The file is the output of `blockrelay plan --json`, or has the class of device of each block.
"""

from pathlib import Path

from blockrelay.bounded_file import read_bounded
from blockrelay.errors import UsageError
from blockrelay.protocol.planned_split import PlannedSplit, parse_planned

_MAX_BYTES = 16 << 20


def read_plan_file(path: Path, blocks: int | None) -> PlannedSplit:
    """Reads the stages of a plan for a model of `blocks` blocks (None if their number is not known yet).

    Raises UsageError, one line that names the file, if it cannot be read, is no plan, or its stages do not cover these
    blocks.
    """
    planned = parse_planned(read_bounded(path, _MAX_BYTES), str(path))
    if blocks is not None and (count := planned.blocks) != blocks:
        odd = f"it lacks block_{count + 1}" if count < blocks else f"there is no block_{blocks + 1}"
        raise UsageError(f"{path}: a plan of {count} blocks, but the model has {blocks}: {odd}")
    return planned

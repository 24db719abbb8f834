"""A plan in a file: what `blockrelay plan --json` wrote, for schedulers, `up` and `plan apply`."""

from pathlib import Path

from blockrelay.errors import UsageError
from blockrelay.protocol.planned_split import PlannedSplit, parse_planned

_MAX_BYTES = 16 << 20


def read_plan_file(path: Path, blocks: int) -> PlannedSplit:
    """The stages in a file, for a model of `blocks` blocks.

    UsageError, one line that names the file: it cannot be read, is no plan, or its stages do not cover these blocks.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    if len(content) > _MAX_BYTES:
        raise UsageError(f"{path}: larger than {_MAX_BYTES >> 20} MiB")
    planned = parse_planned(content, str(path))
    if planned.blocks != blocks:
        raise UsageError(f"{path}: a plan of {planned.blocks} blocks, but the model has {blocks}")
    return planned

"""The precisions of a model's blocks, and the text in which people write them:

    w8a8                                  w8a8 for every block
    w8a8,block_33=fp32,block_1-4=w4a8     w8a8 for every block but the named ones

The precisions of a model are a tuple, that of block i at index i-1.
"""

import re
from collections.abc import Sequence
from itertools import groupby

from blockrelay.block_folder.model import PRECISIONS, Precision, is_exact
from blockrelay.errors import UsageError

#: The precision of a model for which none is named.
DEFAULT_PRECISION: Precision = "w8a8"
_PART = re.compile(r"block_([1-9]\d{0,8})(?:-([1-9]\d{0,8}))?=(\w+)")


def parse_precisions(text: str, blocks: int) -> tuple[Precision, ...]:
    """Returns the precisions of `blocks` blocks that `text` stands for.

    Raises UsageError that names the part that makes no sense or has a block a second time.
    """
    first, *parts = (part.strip() for part in text.split(","))
    precisions: list[Precision] = [_precision(first, first)] * blocks
    named: set[int] = set()
    for part in parts:
        match = _PART.fullmatch(part)
        if match is None:
            raise UsageError(f"precision {part!r}: write block_3=w4a8 or block_1-4=w4a8 behind the first one")
        start, end = int(match[1]), int(match[2] or match[1])
        if not start <= end <= blocks:
            raise UsageError(f"precision {part!r}: the model has block_1 to block_{blocks}")
        for index in range(start, end + 1):
            if index in named:
                raise UsageError(f"precision {part!r}: block_{index} is named twice")
            named.add(index)
            precisions[index - 1] = _precision(match[3], part)
    return tuple(precisions)


def _precision(name: str, part: str) -> Precision:
    for precision in PRECISIONS:
        if name == precision:
            return precision
    raise UsageError(f"precision {part!r}: {name!r} is none of {', '.join(PRECISIONS)}")


def format_precisions(precisions: Sequence[Precision]) -> str:
    """Returns the text for `precisions`: the most frequent one first, then the others in the order of blocks.

    Equal precisions give equal texts, and `parse_precisions` reads them back.
    """
    common = max(PRECISIONS, key=precisions.count)  # of equally frequent ones the first of PRECISIONS
    parts: list[str] = [common]
    for precision, group in groupby(enumerate(precisions, 1), key=lambda pair: pair[1]):
        indexes = [index for index, _ in group]
        if precision != common:
            blocks = f"{indexes[0]}-{indexes[-1]}" if len(indexes) > 1 else f"{indexes[0]}"
            parts.append(f"block_{blocks}={precision}")
    return ",".join(parts)


def all_exact(precisions: Sequence[Precision]) -> bool:
    """Returns whether a model is exact: all its blocks are. One other block makes all bits behind it uncertain."""
    return all(is_exact(precision) for precision in precisions)


def kv_item_bytes(precisions: Sequence[Precision]) -> int:
    """Returns the bytes of one number in a KV page: 4 (float32) if all blocks are fp32, else 2 (float16)."""
    return 4 if all(precision == "fp32" for precision in precisions) else 2


def kv_cache_layout(precisions: Sequence[Precision]) -> str:
    """Returns the name of the numbers in a KV page: `fp32` if all blocks are fp32, else `fp16`."""
    return "fp32" if kv_item_bytes(precisions) == 4 else "fp16"

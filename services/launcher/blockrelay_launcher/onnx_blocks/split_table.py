"""Formats the blocks of a split model as a table, with a line for each tensor from an earlier block. Pure."""

from collections.abc import Iterator, Sequence

from blockrelay.onnx_blocks.reports.splitting import SplitBlock
from blockrelay.quantities import aligned, format_quantity

_HEAD = ("BLOCK", "NODES", "WEIGHTS", "FROM EARLIER BLOCKS")


def split_table(blocks: Sequence[SplitBlock]) -> str:
    """Returns the table as text, in aligned columns."""
    return aligned([_HEAD, *(row for block in blocks for row in _rows(block))])


def _rows(block: SplitBlock) -> Iterator[tuple[str, str, str, str]]:
    name, nodes, weights = block.file, str(block.nodes), format_quantity(block.weight_bytes, "B")
    for border in block.border or ("",):
        yield name, nodes, weights, border
        name = nodes = weights = ""

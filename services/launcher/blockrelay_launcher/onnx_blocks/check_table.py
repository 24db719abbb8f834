"""Formats the result of a check as a table, with a line for each output of each block. Pure."""

from collections.abc import Iterator, Sequence

from blockrelay.onnx_blocks.reports.checking import CheckedBlock, CheckedTensor
from blockrelay.onnx_blocks.signature import shown
from blockrelay.quantities import aligned

_HEAD = ("BLOCK", "OUTPUT", "DECLARED", "ACTUAL", "DTYPE", "SECONDS", "RESULT")


def table(blocks: Sequence[CheckedBlock]) -> str:
    """Returns the table as text. A column has the nodes that ran on the CPU, if the number is known of any block."""
    with_cpu = any(block.nodes is not None for block in blocks)
    rows = [(*_HEAD[:-1], *(("ON CPU",) if with_cpu else ()), _HEAD[-1])]
    rows += [row for block in blocks for row in _rows(block, with_cpu=with_cpu)]
    return aligned(rows)


def _rows(block: CheckedBlock, *, with_cpu: bool) -> Iterator[tuple[str, ...]]:
    seconds = "" if block.seconds is None else f"{block.seconds:.4f}"
    on_cpu = "" if block.nodes is None else f"{block.nodes_on_cpu} of {block.nodes} nodes"
    result = block.problem or "passed"
    for index, output in enumerate(block.outputs or (None,)):
        name, of_block = (block.block, (seconds, on_cpu, result)) if index == 0 else ("", ("", "", ""))
        cells = _cells(output) if output is not None else ("", "", "", "")
        yield (name, *cells, of_block[0], *((of_block[1],) if with_cpu else ()), of_block[2])


def _cells(output: CheckedTensor) -> tuple[str, str, str, str]:
    declared = "any" if output.declared is None else shown(output.declared)
    actual = "" if output.shape is None else shown(output.shape)
    dtype = output.declared_dtype
    if output.dtype not in ("", dtype):
        dtype = f"{dtype}, is {output.dtype}"
    return output.name, declared, actual, dtype

"""Known answers of ONNX blocks that others made: each block of a device is compared with the same file on ONNX
Runtime's CPU provider, which gets the same, before the stage takes work.

The steps are those of `known_answers`. Blocks go one by one, each through all steps, so that the reference has one
block in memory; what the reference's block gave is what the next one gets on both sides. So a wrong kernel is named by
its block, and rounding does not add up.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import ExecutionError, KnownAnswerMismatch
from blockrelay_worker.execution.batch import Segment
from blockrelay_worker.execution.onnx.as_is.block import AsIsBlock, on_host
from blockrelay_worker.execution.onnx.as_is.groups import POSITIONS, grouped, waves
from blockrelay_worker.execution.onnx.bound.pages import DevicePages
from blockrelay_worker.execution.onnx.graphs.flavours import FloatType
from blockrelay_worker.execution.onnx.known_answers import PAGE_TOLERANCE, Step, row_error

#: How far a row may be from the reference's, as a part of its length. In float32 it is what Vulkan promises of a
#: cosine, 2**-11, and as much again: graphs that others made compute the rotation on the device. Wrong kernels are off
#: by a tenth.
TOLERANCES: Mapping[FloatType, float] = {"float32": 1e-3, "float16": 2e-2}
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Side:
    """The device, or the reference: where its blocks' KV is, and how to open block `index`."""

    pages: DevicePages
    block: Callable[[int], AsIsBlock]


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of one group, or pages that move before it."""

    case: str
    inputs: Arrays
    moved: Sequence[tuple[int, int]] = ()


def prove(
    device: Side,
    reference: Side,
    steps: Sequence[Step],
    tokens: Sequence[NDArray[np.int32]],
    request: Mapping[str, str],
    *,
    blocks: int,
    single: bool,
    one_by_one: bool,
    longest: int,
    where: str,
    tolerance: float,
    proved: Callable[[], None],
) -> None:
    """Raises KnownAnswerMismatch naming the block, the device `where`, and what is further off than `tolerance`.

    Both have pages enough for the `steps`, which nobody uses. `tokens` are those of each step; a context has `longest`
    positions. `proved` is called behind each run.
    """
    runs = list(_runs(steps, tokens, request, single=single, one_by_one=one_by_one, longest=longest))
    given: list[dict[str, Any]] = [dict(run.inputs) for run in runs]
    for index in range(1, blocks + 1):
        known, asked = reference.block(index), device.block(index)
        for run, have in zip(runs, given, strict=True):
            for source, target in run.moved:
                for side in (device, reference):
                    side.pages.import_pages([target], side.pages.export_pages([source]))
            right = known.run(have, reference.pages.pools)
            try:
                found = asked.run(have, device.pages.pools)
            except Exception as error:  # ONNX Runtime's own exception types have no public common base
                raise ExecutionError(f"{asked.name} failed: {run.case}: {error}", block=asked.name) from error
            for name, value in right.items():
                have[name] = on_host(value)
                _compare(asked.name, f"{run.case}: {name}", on_host(found[name]), have[name], where, tolerance)
            proved()
    for page in sorted({page for step in steps for _, _, own in step.parts for page in own}):
        found, right = (side.pages.export_pages([page])[0] for side in (device, reference))
        for layer, (theirs, ours) in enumerate(zip(found, right, strict=True), 1):
            for theirs_half, half in zip(theirs, ours, strict=True):
                name = f"pages of layer {layer}"
                _compare(f"block_{layer}", name, theirs_half, half, where, max(tolerance, PAGE_TOLERANCE), whole=True)


def _runs(
    steps: Sequence[Step],
    tokens: Sequence[NDArray[np.int32]],
    request: Mapping[str, str],
    *,
    single: bool,
    one_by_one: bool,
    longest: int,
) -> "list[_Run]":
    found: list[_Run] = []
    for step, own in zip(steps, tokens, strict=True):
        segments = [Segment(rows=rows, first_position=first, pages=pages) for rows, first, pages in step.parts]
        groups = [
            group
            for wave in waves(segments, one_by_one=one_by_one)
            for group in grouped(wave, own, range(step.rows), request, single=single)
        ]
        found += [
            _Run(step.case, group.inputs, step.moved if number == 0 else ()) for number, group in enumerate(groups)
        ]
    far = found[0].inputs
    if POSITIONS in far:  # cosines of large angles are where devices differ most
        last = np.full_like(far[POSITIONS], longest - 1)
        found.append(_Run("the last position of the context", {**far, POSITIONS: last}))
    return found


def _compare(
    block: str,
    what: str,
    found: NDArray[Any],
    right: NDArray[Any],
    where: str,
    tolerance: float,
    *,
    whole: bool = False,
) -> None:
    """Floats by the worst row, everything else bit by bit. `whole`: as one row."""
    if found.dtype.kind != "f":
        error = float(not np.array_equal(found, right))
    else:
        width = right.size if whole else right.shape[-1]
        error = row_error(found.reshape(-1, width), right.reshape(-1, width))
    if not error <= tolerance:  # what is not a number is not
        raise KnownAnswerMismatch(
            f"{where} computes wrong numbers in {block}: {what}: off by {error:.2g} of a row's length, where "
            f"{tolerance:.2g} is allowed; refusing to serve with it; another driver may be right",
            block=block,
        )

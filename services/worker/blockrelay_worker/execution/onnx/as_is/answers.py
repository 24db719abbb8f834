"""Known answers of ONNX blocks that others made: each block on the device is compared with the same file on ONNX
Runtime's CPU provider, with the same inputs, before the stage takes work.

The steps are those of `known_answers`. Each block goes through all steps before the next one, so that the reference has
one block in memory. The next block gets the reference's output on both sides. So an error names the block with the
wrong kernel, and rounding does not add up. The inputs that a stage takes from earlier stages are made up, the same on
both sides. But integers are lengths and positions: they are those that the earlier blocks compute in these steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import ExecutionError
from blockrelay.onnx_blocks.dimensions import StepSizes
from blockrelay.onnx_blocks.handed_on import handed_on, shapes_handed_on
from blockrelay.onnx_blocks.wiring import FromBlock
from blockrelay_worker.execution.batch import Batch, NamedTensors, StageOutput
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.onnx.as_is.block import on_host
from blockrelay_worker.execution.onnx.as_is.groups import POSITIONS, grouped, waves
from blockrelay_worker.execution.onnx.as_is.handing_on import joined
from blockrelay_worker.execution.onnx.as_is.made_up import made_up
from blockrelay_worker.execution.onnx.as_is.paged_graph import TAKEN
from blockrelay_worker.execution.onnx.as_is.served_blocks import ServedBlocks
from blockrelay_worker.execution.onnx.as_is.stage import AsIsStage
from blockrelay_worker.execution.onnx.graphs.flavours import FloatType
from blockrelay_worker.execution.onnx.known_answers import (
    OF_A_COMPOSITION,
    PAGE_TOLERANCE,
    PAGES_NEEDED,
    STEPS,
    Answers,
    KnownStep,
    mismatch,
    possible,
    row_error,
)
from blockrelay_worker.execution.self_test import fixed_tokens

#: Allowed distance of a row from the reference's, relative to its length. In float32 it is twice the error that Vulkan
#: allows for a cosine, 2**-11: graphs of others compute the rotary embedding on the device. Wrong kernels are off by
#: a tenth.
TOLERANCES: Mapping[FloatType, float] = {"float32": 1e-3, "float16": 2e-2}
Arrays = Mapping[str, NDArray[Any]]


class MadeUpTensors:
    """Made-up inputs, in known steps, for the tensors that a stage beginning with `first_block` takes from earlier
    blocks."""

    def __init__(self, served: ServedBlocks, first_block: int, steps: Sequence[KnownStep]) -> None:
        """Computes the integers that earlier blocks give in `steps`, if the stage takes any. `first_block` is not 1.

        Raises OnnxBlocksError for an earlier block's file that cannot be read, and ONNX Runtime's error if such a block
        fails on its CPU provider.
        """
        self._taken = handed_on(served.wiring, first_block - 1)
        self._served, self._first_block = served, first_block
        sizes = {
            (part.segment.rows, part.segment.first_position)
            for step in steps
            for wave in waves(step.segments, one_by_one=served.one_by_one)
            for part in wave
        }
        whole = any(np.dtype(one.tensor.dtype).kind in "iu" for one in self._taken)
        self._integers: Mapping[tuple[int, int], Arrays] = served.integers(self._taken, sizes) if whole else {}

    def given(self, rows: int, past: int) -> dict[str, NDArray[Any]]:
        """Returns the tensors, by name, of one sequence with `rows` new tokens and `past` earlier ones.

        Both numbers are those of a part in the waves of the `steps` given at construction. Raises OnnxBlocksError for a
        tensor that cannot be made up, or whose shape does not follow from the files.
        """
        sizes, tensors = StepSizes(batch=1, new=rows, past=past), dict[str, NDArray[Any]]()
        shapes = shapes_handed_on(self._served.wiring, self._first_block - 1, sizes)
        for one in self._taken:
            source, file = FromBlock(one.maker.index), one.maker.file
            given = self._integers.get((rows, past), {})
            tensors[one.name] = made_up(file, one.tensor, source, shapes[one.name], sizes, vocabulary=None, given=given)
        return tensors

    def tensors(self, step: KnownStep) -> list[list[NamedTensors]]:
        """Returns the tensors of one of the `steps`, as a stage takes them: a list for each part of the step.

        Raises OnnxBlocksError for a tensor that cannot be made up, or whose shape does not follow from the files.
        """
        tensors: list[list[NamedTensors]] = [[] for _ in step.parts]
        for wave in waves(step.segments, one_by_one=self._served.one_by_one):
            for part in wave:
                rows, past = part.segment.rows, part.segment.first_position
                tensors[part.number].append(NamedTensors(rows=rows, arrays=self.given(rows, past)))
        return tensors


@dataclass(frozen=True, slots=True)
class PartAnswers:
    """What a stage of some of the blocks gave in `steps`, with these `batches`. It must always give this."""

    blocks: str
    """The blocks' names, for messages."""
    steps: tuple[KnownStep, ...]
    batches: tuple[Batch, ...]
    outputs: tuple[tuple[tuple[str, NDArray[Any]], ...], ...]
    """For each step the name and content of each output."""

    def check_step(self, stage: Executor, number: int, *, first_page: int, tolerance: float, where: str) -> None:
        """Has `stage` compute step `number` (an index in `steps`) again, and compares its outputs with the known ones.

        Uses the PAGES_NEEDED pages from `first_page` on. A step reads what earlier ones left there: begin with step 0,
        run them in order, and let nothing else use the pages. `tolerance` is the largest error of a row that counts as
        right, relative to the row's length; what is no float must be equal. Raises KnownAnswerMismatch, whose message
        begins with `where`, for an output that is further off, and ExecutionError if the step fails.
        """
        step = self.steps[number]
        batch = replace(self.batches[number], segments=step.at(first_page).segments)
        for (name, expected), (_, actual) in zip(self.outputs[number], _given(stage.run(batch)), strict=True):
            _compare(self.blocks, f"{step.case}: {name}", actual, expected, where, tolerance)


#: The known answers of a stage.
Known = Answers | PartAnswers


def part_answers(stage: Executor, served: ServedBlocks, first_block: int, last_block: int) -> PartAnswers:
    """Returns what `stage`, of blocks `first_block` to `last_block`, gives now in the steps of OF_A_COMPOSITION.

    Uses its first pages, which must be free. Raises ExecutionError if a step fails, OnnxBlocksError if an input cannot
    be made up, and ONNX Runtime's error if an earlier block, computed for integers, fails.
    """
    steps, model = possible(OF_A_COMPOSITION, served.folder.model), served.folder.model
    made = None if first_block == 1 else MadeUpTensors(served, first_block, steps)
    batches = tuple(
        Batch(
            segments=step.segments,
            tokens=fixed_tokens(model, step.rows),
            tensors=() if made is None else made.tensors(step),
            wanted=range(step.rows) if stage.gives_logits else (),
        )
        for step in steps
    )
    first, last = f"block_{first_block}", f"block_{last_block}"
    outputs = tuple(tuple((name, array.copy()) for name, array in _given(stage.run(batch))) for batch in batches)
    return PartAnswers(first if first == last else f"{first} to {last}", steps, batches, outputs)


def _given(output: StageOutput) -> list[tuple[str, NDArray[Any]]]:
    """Returns each output of a stage with its name."""
    if output.logits is not None:
        return [(TAKEN, output.logits)]
    assert output.tensors is not None, "a stage gives logits or tensors"
    return [each for parts in output.tensors for part in parts for each in sorted(part.arrays.items())]


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of one group, and the pages that move before it."""

    case: str
    inputs: Arrays
    moved: Sequence[tuple[int, int]] = ()


def prove(stage: AsIsStage, *, tolerance: float, proved: Callable[[], None]) -> None:
    """Compares each block of `stage` with the same file on ONNX Runtime's CPU provider, in all known steps.

    Nothing may use the stage yet: its first PAGES_NEEDED pages are overwritten. `tolerance` is the largest error of a
    row that counts as right, relative to the row's length; for a KV page it is PAGE_TOLERANCE if that is more. `proved`
    is called after each run of a block.

    Raises KnownAnswerMismatch, which names the block, the device and the output that is further off; ExecutionError if
    a block fails; OnnxBlocksError for a file that cannot be read or an input that cannot be made up; and ONNX Runtime's
    error if the reference fails.
    """
    served, first, last = stage.served, stage.first_block, stage.last_block
    steps, where = possible(STEPS, served.folder.model), served.provider.device
    pages = served.pages_for_reference(first, last, PAGES_NEEDED)
    runs = _runs(served, first, steps, single=stage.single)
    given: list[dict[str, Any]] = [dict(run.inputs) for run in runs]
    for index in range(first, last + 1):
        known, tested = served.reference(index), stage.blocks.get(index)
        for run, have in zip(runs, given, strict=True):
            for source, target in run.moved:
                for side in (stage.pages, pages):
                    side.import_pages([target], side.export_pages([source]))
            expected = known.run(have, pages.pools)
            try:
                actual = tested.run(have, stage.pages.pools)
            except Exception as error:  # ONNX Runtime's own exception types have no public common base
                raise ExecutionError(f"{tested.name} failed: {run.case}: {error}", block=tested.name) from error
            for name, value in expected.items():
                have[name] = on_host(value)
                _compare(tested.name, f"{run.case}: {name}", on_host(actual[name]), have[name], where, tolerance)
            proved()
    for page in sorted({page for step in steps for _, _, own in step.parts for page in own}):
        actual, expected = (side.export_pages([page])[0] for side in (stage.pages, pages))
        makers = [index for index in range(first, last + 1) for _ in served.layers(index, index)]
        for maker, theirs, ours in zip(makers, actual, expected, strict=True):
            for theirs_half, half in zip(theirs, ours, strict=True):
                name = f"page {page}"
                _compare(f"block_{maker}", name, theirs_half, half, where, max(tolerance, PAGE_TOLERANCE), whole=True)


def _runs(served: ServedBlocks, first_block: int, steps: Sequence[KnownStep], *, single: bool) -> list[_Run]:
    """Returns the runs of all steps, and one at the last position of the context if the blocks take positions."""
    taken = handed_on(served.wiring, first_block - 1)
    made = MadeUpTensors(served, first_block, steps) if taken else None
    runs: list[_Run] = []
    for step in steps:
        own = fixed_tokens(served.folder.model, step.rows)
        groups = [
            group
            for wave in waves(step.segments, one_by_one=served.one_by_one)
            for group in grouped(wave, own, range(step.rows), served.request, single=single)
        ]
        for number, group in enumerate(groups):
            rows, past = group.parts[0].segment.rows, group.parts[0].segment.first_position
            if made is not None:
                parts = [replace(part, given=made.given(rows, past)) for part in group.parts]
                group.inputs.update(joined(parts, taken, f"block_{first_block}"))
            runs.append(_Run(step.case, group.inputs, step.moved if number == 0 else ()))
    far = runs[0].inputs
    if POSITIONS in far:  # devices differ most in cosines of large angles
        last = np.full_like(far[POSITIONS], served.folder.model.max_position - 1)
        runs.append(_Run("the last position of the context", {**far, POSITIONS: last}))
    return runs


def _compare(
    block: str,
    what: str,
    actual: NDArray[Any],
    expected: NDArray[Any],
    where: str,
    tolerance: float,
    *,
    whole: bool = False,
) -> None:
    """Compares floats by the worst row, everything else bit by bit. `whole`: the array is one row. Raises
    KnownAnswerMismatch."""
    if actual.dtype.kind != "f":
        error = float(not np.array_equal(actual, expected))
    else:
        width = expected.size if whole else expected.shape[-1]
        error = row_error(actual.reshape(-1, width), expected.reshape(-1, width))
    if not error <= tolerance:  # NaN is an error too
        raise mismatch(f"{where} computes wrong numbers in {block}: {what}", error, tolerance, block)

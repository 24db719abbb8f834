"""Known answers of a device: blocks are compared with a reference, and stages with their blocks, before they take work.

Drivers give wrong numbers without an error: on GPUs with small subgroups, a kernel for prompts of 32 tokens and more is
wrong from its fifth row on, where 31 tokens are right. So the steps take every path through the kernels: one token,
sizes just below, at and above those where kernels change, tokens behind a past, several requests at once, and pages
that are exported and imported. The reference is the same blocks on ONNX Runtime's CPU provider in float32, one block in
memory at a time. Each block of the device gets the reference's input: in float16 the rounding of one block grows in the
next ones, until it looks like a wrong kernel. What may still be wrong is how blocks are put together, so a stage must
give what its own blocks give, one by one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.model import ModelConfig
from blockrelay.errors import KnownAnswerMismatch
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.onnx.graphs.flavours import FloatType
from blockrelay_worker.execution.self_test import fixed_rows, fixed_tokens

#: KV pages that the steps take in the pool of a stage.
PAGES_NEEDED = 8
#: Allowed distance of a row from the reference's, relative to its length. In float32 some 1e-6 is usual, in float16
#: 1e-3; wrong kernels are off by a tenth.
TOLERANCES: dict[FloatType, float] = {"float32": 1e-4, "float16": 2e-2}
#: The same for a KV page: float16 rounds by 2**-11 at most.
PAGE_TOLERANCE = 2.0**-10


@dataclass(frozen=True, slots=True)
class KnownStep:
    """A known batch of (tokens, first position, pages). Before it runs, the contents of pages are `moved` (from, to),
    as if they came from another executor."""

    case: str
    parts: tuple[tuple[int, int, tuple[int, ...]], ...]
    moved: tuple[tuple[int, int], ...] = ()

    @property
    def rows(self) -> int:
        """Tokens of the whole batch."""
        return sum(rows for rows, _, _ in self.parts)

    @property
    def segments(self) -> list[Segment]:
        """The segments of the batch."""
        return [Segment(rows=rows, first_position=first, pages=own) for rows, first, own in self.parts]

    def at(self, first_page: int) -> "KnownStep":
        """Returns the same step on pages from `first_page` on."""
        parts = tuple((rows, first, tuple(first_page + page for page in own)) for rows, first, own in self.parts)
        return replace(self, parts=parts, moved=tuple((first_page + a, first_page + b) for a, b in self.moved))


_SCATTERED, _A, _B, _C = (5, 0, 7, 2, 4), (3, 6), (1, 7, 0), (4,)
STEPS = (
    *(KnownStep(f"a prompt of {rows}", ((rows, 0, _SCATTERED),)) for rows in (1, 31, 32, 33, 65)),
    KnownStep("the first 40 rows", ((40, 0, _SCATTERED),)),
    KnownStep("20 rows behind 40", ((20, 40, _SCATTERED),)),
    KnownStep("one row behind 60", ((1, 60, _SCATTERED),)),
    KnownStep("prompts of 20 and 3", ((20, 0, _A), (3, 0, _B))),
    KnownStep("one row behind 20, 33 behind 3, a prompt of 9", ((1, 20, _A), (33, 3, _B), (9, 0, _C))),
    KnownStep("one row behind 21, one behind 36, two behind 9", ((1, 21, _A), (1, 36, _B), (2, 9, _C))),
    KnownStep("one row behind pages that were moved", ((1, 22, (2, 5)),), moved=((3, 2), (6, 5))),
)
#: Enough for a stage whose blocks have passed all of STEPS: many tokens and few, several sequences, and tokens with a
#: past, so that each block gets the output of the one before it.
OF_A_COMPOSITION = (
    KnownStep("prompts of 33 and 3", ((33, 0, _SCATTERED), (3, 0, _A))),
    KnownStep("one row behind 33, two behind 3", ((1, 33, _SCATTERED), (2, 3, _A))),
)


@dataclass(frozen=True, slots=True)
class Answers:
    """What the blocks `first_block..last_block` must give: the output of each step (hidden rows, or logits of all
    rows), and the contents of the pages that moved: for each page and layer the keys, then the values.

    `inputs` has for each step the token ids, int32 [rows], or the hidden rows, float32 [rows, H].
    """

    first_block: int
    last_block: int
    steps: tuple[KnownStep, ...]
    inputs: tuple[NDArray[Any], ...]
    outputs: tuple[NDArray[np.float32], ...]
    pages: tuple[NDArray[Any], ...]

    @property
    def blocks(self) -> str:
        """The blocks' names, for messages."""
        first, last = f"block_{self.first_block}", f"block_{self.last_block}"
        return first if first == last else f"{first} to {last}"

    def check_step(self, stage: Executor, number: int, *, first_page: int, tolerance: float, where: str) -> None:
        """Has `stage` compute step `number` again, on pages from `first_page` on. Raises KnownAnswerMismatch if the
        result is further than `tolerance` from the known one, ExecutionError if there is no result. `where` begins the
        message."""
        step = self.steps[number].at(first_page)
        output, _ = run_step(stage, step, self.inputs[number])
        compare(step.case, output, self.outputs[number], self, where, tolerance)


def answers_of_blocks(
    folder: BlockFolder, first_block: int, last_block: int, reference: Callable[[BlockFolder, int], Executor]
) -> Iterator[Answers]:
    """Yields the answers of each of the blocks `first_block..last_block`, in order; the output of one is the input of
    the next. `reference` makes an executor of one block with PAGES_NEEDED pages or more, which is closed after use.

    Steps beyond the model's longest context are left out. Raises what `reference` raises, and ExecutionError if a step
    fails.
    """
    steps = possible(STEPS, folder.model)
    inputs = tuple(_input(folder.model, step.rows, tokens=first_block == 1) for step in steps)
    for block in range(first_block, last_block + 1):
        executor = reference(folder, block)
        try:
            outputs, pages = _walked(executor, steps, inputs)
        finally:
            executor.close()
        yield Answers(block, block, steps, inputs, outputs, pages)
        inputs = outputs


def known_answers(
    folder: BlockFolder, first_block: int, last_block: int, reference: Callable[[BlockFolder, int], Executor]
) -> Answers:
    """Returns what blocks `first_block..last_block` must give together, from `answers_of_blocks`. Raises ExecutionError
    if a step fails, and what `reference` raises."""
    blocks = list(answers_of_blocks(folder, first_block, last_block, reference))
    steps = blocks[0].steps
    pages = _by_page([block.pages for block in blocks], steps)
    return Answers(first_block, last_block, steps, blocks[0].inputs, blocks[-1].outputs, pages)


def composed_answers(stage: Executor, first_block: int, last_block: int, model: ModelConfig) -> Answers:
    """Returns what `stage` gives now in the steps OF_A_COMPOSITION. Uses its first PAGES_NEEDED pages, which must be
    free. Raises ExecutionError if a step fails."""
    steps = possible(OF_A_COMPOSITION, model)
    inputs = tuple(_input(model, step.rows, tokens=first_block == 1) for step in steps)
    outputs, pages = _walked(stage, steps, inputs)
    return Answers(first_block, last_block, steps, inputs, outputs, pages)


def check(stage: Executor, answers: Answers, *, where: str, tolerance: float) -> None:
    """Raises KnownAnswerMismatch naming the device `where` and the first step that is further off than `tolerance`.

    For moved pages the limit is PAGE_TOLERANCE if that is more. Raises ExecutionError if a step fails, and what
    `Executor.export_pages` raises. Takes all pages of a stage that nothing uses yet, PAGES_NEEDED or more, and gives
    them back.
    """
    outputs, pages = _results(stage, answers)
    for step, actual, expected in zip(answers.steps, outputs, answers.outputs, strict=True):
        compare(step.case, actual, expected, answers, where, tolerance)
    for actual, expected in zip(pages, answers.pages, strict=True):
        compare("pages as they leave", actual, expected, answers, where, max(tolerance, PAGE_TOLERANCE))


def furthest_row(stage: Executor, answers: Answers) -> float:
    """Returns the error of the worst row of all steps, relative to its length; NaN if a row has a NaN. Takes pages and
    raises as `check` does, but no KnownAnswerMismatch."""
    outputs, _ = _results(stage, answers)
    return worst(row_error(actual, expected) for actual, expected in zip(outputs, answers.outputs, strict=True))


def worst(errors: Iterable[float]) -> float:
    """Returns the largest error; NaN if one of them is NaN, which `max` would lose. There is at least one."""
    return float(np.max(list(errors)))


def _results(stage: Executor, answers: Answers) -> tuple[tuple[NDArray[np.float32], ...], tuple[NDArray[Any], ...]]:
    taken = stage.pool.allocate(stage.pool.free_pages)
    try:
        return _walked(stage, answers.steps, answers.inputs)
    finally:
        stage.pool.free(taken)


def possible(steps: Sequence[KnownStep], model: ModelConfig) -> tuple[KnownStep, ...]:
    """Returns the steps without those beyond the model's longest context."""
    return tuple(step for step in steps if all(first + rows <= model.max_position for rows, first, _ in step.parts))


def _input(model: ModelConfig, rows: int, *, tokens: bool) -> NDArray[Any]:
    return fixed_tokens(model, rows) if tokens else fixed_rows(model, rows)


def _walked(
    executor: Executor, steps: Sequence[KnownStep], inputs: Sequence[NDArray[Any]]
) -> tuple[tuple[NDArray[np.float32], ...], tuple[NDArray[Any], ...]]:
    """Returns the output of each step, and the keys and values, [kv_heads, ...], of each layer of each page that
    moved."""
    outputs: list[NDArray[np.float32]] = []
    pages: list[NDArray[Any]] = []
    for step, given in zip(steps, inputs, strict=True):
        output, moved = run_step(executor, step, given)
        outputs.append(output)
        pages += moved
    return tuple(outputs), tuple(pages)


def run_step(
    executor: Executor, step: KnownStep, given: NDArray[Any]
) -> tuple[NDArray[np.float32], list[NDArray[Any]]]:
    """Returns the output of a step, and the keys and values of the pages that moved before it.

    The output is hidden rows or the logits of all rows. `given`: token ids, int32 [rows], for an executor with block 1,
    else hidden rows, float32 [rows, H]. Raises ExecutionError if the step fails, and what `export_pages` and
    `import_pages` of the executor raise.
    """
    pages: list[NDArray[Any]] = []
    for source, target in step.moved:
        contents = executor.export_pages([source])
        pages += [half.copy() for content in contents for halves in content for half in halves]
        executor.import_pages([target], contents)
    output = executor.run(
        Batch(
            segments=step.segments,
            tokens=given if executor.takes_tokens else None,
            hidden=None if executor.takes_tokens else given,
            wanted=range(step.rows) if executor.gives_logits else (),
        )
    )
    result = output.hidden if output.logits is None else output.logits
    assert result is not None
    return result.copy(), pages


def _by_page(moved: Sequence[tuple[NDArray[Any], ...]], steps: Sequence[KnownStep]) -> tuple[NDArray[Any], ...]:
    """Returns the moved pages ordered by page and then block, from lists ordered by block and then page."""
    count = sum(len(step.moved) for step in steps)
    return tuple(half for page in range(count) for block in moved for half in block[2 * page : 2 * page + 2])


def compare(
    case: str, actual: NDArray[Any], expected: NDArray[Any], answers: Answers, where: str, tolerance: float
) -> None:
    """Raises KnownAnswerMismatch if the worst row of `actual` is further than `tolerance` from `expected`, or NaN.
    `where` and `case` are named in the message."""
    error = row_error(actual, expected)
    if not error <= tolerance:  # NaN is an error too
        what = f"{where} computes wrong numbers in {answers.blocks}: {case}"
        raise mismatch(what, error, tolerance, f"block_{answers.first_block}")


def mismatch(what: str, error: float, tolerance: float, block: str) -> KnownAnswerMismatch:
    """Returns the exception for an `error` beyond `tolerance`; `what` begins its message."""
    return KnownAnswerMismatch(
        f"{what}: off by {error:.2g} of a row's length, where {tolerance:.2g} is allowed; refusing to serve with it; "
        "another driver may be right",
        block=block,
    )


def row_error(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """Returns the error of the worst row relative to its length (the Euclidean norm of the expected row).

    An array that is not a matrix counts as one row. The result is NaN if one of the arrays has a NaN. Both have the
    same shape.
    """
    shape = expected.shape if expected.ndim == 2 else (1, -1)
    wide = expected.astype(np.float64).reshape(shape)
    off = np.linalg.norm(actual.astype(np.float64).reshape(shape) - wide, axis=1)
    return float((off / np.maximum(np.linalg.norm(wide, axis=1), 1e-30)).max())

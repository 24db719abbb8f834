"""Known answers of a device: blocks are compared with a reference, and stages with their blocks, before they take work.

Drivers are wrong without a word: on GPUs with small subgroups a kernel for prompts of 32 rows and more gives rubbish
from its fifth row on, where 31 rows are right. So every way through the kernels is walked: one row, just below, at and
above the sizes where kernels change, rows behind others, several requests at once, pages that go away and come back.
The reference is the same blocks on ONNX Runtime's CPU provider in float32, one block in memory at a time. Each block of
the device gets what the reference's block got: in float16 the rounding of one block grows in those behind it, until it
looks like a wrong kernel. What is left to be wrong is how blocks are put together: a stage must give what its own
blocks give, one by one.
"""

from collections.abc import Callable, Iterator, Sequence
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

#: In the pool of a stage that is asked.
PAGES_NEEDED = 8
#: How far a row may be from the reference's, as a part of its length. In float32 some 1e-6 is usual, in float16 1e-3;
#: wrong kernels are off by a tenth.
TOLERANCES: dict[FloatType, float] = {"float32": 1e-4, "float16": 2e-2}
#: The same of a page: float16 rounds by 2**-11 at most.
PAGE_TOLERANCE = 2.0**-10


@dataclass(frozen=True, slots=True)
class Step:
    """A batch of (rows, first position, pages). Before it, pages `moved` from one place to another as if they had come
    from another executor."""

    case: str
    parts: tuple[tuple[int, int, tuple[int, ...]], ...]
    moved: tuple[tuple[int, int], ...] = ()

    @property
    def rows(self) -> int:
        return sum(rows for rows, _, _ in self.parts)

    def at(self, first_page: int) -> "Step":
        """The same on pages from `first_page` on."""
        parts = tuple((rows, first, tuple(first_page + page for page in own)) for rows, first, own in self.parts)
        return replace(self, parts=parts, moved=tuple((first_page + a, first_page + b) for a, b in self.moved))


_SCATTERED, _A, _B, _C = (5, 0, 7, 2, 4), (3, 6), (1, 7, 0), (4,)
STEPS = (
    *(Step(f"a prompt of {rows}", ((rows, 0, _SCATTERED),)) for rows in (1, 31, 32, 33, 65)),
    Step("the first 40 rows", ((40, 0, _SCATTERED),)),
    Step("20 rows behind 40", ((20, 40, _SCATTERED),)),
    Step("one row behind 60", ((1, 60, _SCATTERED),)),
    Step("prompts of 20 and 3", ((20, 0, _A), (3, 0, _B))),
    Step("one row behind 20, 33 behind 3, a prompt of 9", ((1, 20, _A), (33, 3, _B), (9, 0, _C))),
    Step("one row behind 21, one behind 36, two behind 9", ((1, 21, _A), (1, 36, _B), (2, 9, _C))),
    Step("one row behind pages that were moved", ((1, 22, (2, 5)),), moved=((3, 2), (6, 5))),
)
#: Enough for blocks that have been through all of these, in a stage that is composed of them: many rows and few, in
#: several sequences, and rows behind them, so that each block gets what the one before it gives.
OF_A_COMPOSITION = (
    Step("prompts of 33 and 3", ((33, 0, _SCATTERED), (3, 0, _A))),
    Step("one row behind 33, two behind 3", ((1, 33, _SCATTERED), (2, 3, _A))),
)


@dataclass(frozen=True, slots=True)
class Answers:
    """Of the blocks `first_block..last_block`: the output of each step (rows, or logits of all of them), and what was
    in the pages that moved, of each page and layer the keys and the values."""

    first_block: int
    last_block: int
    steps: tuple[Step, ...]
    inputs: tuple[NDArray[Any], ...]
    outputs: tuple[NDArray[np.float32], ...]
    pages: tuple[NDArray[Any], ...]

    @property
    def blocks(self) -> str:
        """Their names."""
        first, last = f"block_{self.first_block}", f"block_{self.last_block}"
        return first if first == last else f"{first} to {last}"

    def check_step(self, stage: Executor, number: int, *, first_page: int, tolerance: float, where: str) -> None:
        """Has `stage` compute step `number` again, on pages from `first_page` on. Raises KnownAnswerMismatch when what
        it gives is not the known one, ExecutionError when there is none."""
        step = self.steps[number].at(first_page)
        output, _ = taken(stage, step, self.inputs[number])
        compare(step.case, output, self.outputs[number], self, where, tolerance)


def answers_of_blocks(
    folder: BlockFolder, first_block: int, last_block: int, reference: Callable[[BlockFolder, int], Executor]
) -> Iterator[Answers]:
    """What each of the blocks `first_block..last_block` must give, in their order, of what the one before it gives: by
    executors of one block, which are closed again.

    Steps beyond the model's longest context are left out.
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
    """What blocks `first_block..last_block` must give together, by `answers_of_blocks`."""
    blocks = list(answers_of_blocks(folder, first_block, last_block, reference))
    steps = blocks[0].steps
    pages = _by_page([block.pages for block in blocks], steps)
    return Answers(first_block, last_block, steps, blocks[0].inputs, blocks[-1].outputs, pages)


def composed_answers(stage: Executor, first_block: int, last_block: int, model: ModelConfig) -> Answers:
    """What `stage`, just now, gives in the steps of a composition, on its first pages, of which nobody has any yet."""
    steps = possible(OF_A_COMPOSITION, model)
    inputs = tuple(_input(model, step.rows, tokens=first_block == 1) for step in steps)
    outputs, pages = _walked(stage, steps, inputs)
    return Answers(first_block, last_block, steps, inputs, outputs, pages)


def check(stage: Executor, answers: Answers, *, where: str, tolerance: float) -> None:
    """Raises KnownAnswerMismatch naming the device `where` and the first step that is further off than `tolerance`.

    Takes the pages 0 to 7 of a stage that nobody uses yet, and gives them back.
    """
    outputs, pages = _asked(stage, answers)
    for step, found, right in zip(answers.steps, outputs, answers.outputs, strict=True):
        compare(step.case, found, right, answers, where, tolerance)
    for found, right in zip(pages, answers.pages, strict=True):
        compare("pages as they leave", found, right, answers, where, max(tolerance, PAGE_TOLERANCE))


def furthest_row(stage: Executor, answers: Answers) -> float:
    """How far the worst row of all is off, as a part of its length. Takes pages as `check` does."""
    outputs, _ = _asked(stage, answers)
    return max(row_error(found, right) for found, right in zip(outputs, answers.outputs, strict=True))


def _asked(stage: Executor, answers: Answers) -> tuple[tuple[NDArray[np.float32], ...], tuple[NDArray[Any], ...]]:
    taken = stage.pool.allocate(stage.pool.free_pages)
    try:
        return _walked(stage, answers.steps, answers.inputs)
    finally:
        stage.pool.free(taken)


def possible(steps: Sequence[Step], model: ModelConfig) -> tuple[Step, ...]:
    """Without those beyond the model's longest context."""
    return tuple(step for step in steps if all(first + rows <= model.max_position for rows, first, _ in step.parts))


def _input(model: ModelConfig, rows: int, *, tokens: bool) -> NDArray[Any]:
    return fixed_tokens(model, rows) if tokens else fixed_rows(model, rows)


def _walked(
    executor: Executor, steps: Sequence[Step], inputs: Sequence[NDArray[Any]]
) -> tuple[tuple[NDArray[np.float32], ...], tuple[NDArray[Any], ...]]:
    """The output of each step, and the keys and values, [kv_heads, ...], of each layer of each page that moved."""
    outputs: list[NDArray[np.float32]] = []
    pages: list[NDArray[Any]] = []
    for step, given in zip(steps, inputs, strict=True):
        output, moved = taken(executor, step, given)
        outputs.append(output)
        pages += moved
    return tuple(outputs), tuple(pages)


def taken(executor: Executor, step: Step, given: NDArray[Any]) -> tuple[NDArray[np.float32], list[NDArray[Any]]]:
    """The output of a step, and the halves of pages that moved before it."""
    pages: list[NDArray[Any]] = []
    for source, target in step.moved:
        contents = executor.export_pages([source])
        pages += [half.copy() for content in contents for halves in content for half in halves]
        executor.import_pages([target], contents)
    output = executor.run(
        Batch(
            segments=[Segment(rows=rows, first_position=first, pages=own) for rows, first, own in step.parts],
            tokens=given if executor.takes_tokens else None,
            hidden=None if executor.takes_tokens else given,
            wanted=range(step.rows) if executor.gives_logits else (),
        )
    )
    result = output.hidden if output.logits is None else output.logits
    assert result is not None
    return result.copy(), pages


def _by_page(moved: Sequence[tuple[NDArray[Any], ...]], steps: Sequence[Step]) -> tuple[NDArray[Any], ...]:
    """What moved, by page and then block, of lists by block and then page."""
    count = sum(len(step.moved) for step in steps)
    return tuple(half for page in range(count) for block in moved for half in block[2 * page : 2 * page + 2])


def compare(
    case: str, found: NDArray[Any], right: NDArray[Any], answers: Answers, where: str, tolerance: float
) -> None:
    """By the worst row. Raises KnownAnswerMismatch."""
    error = row_error(found, right)
    if not error <= tolerance:  # what is not a number is not
        raise KnownAnswerMismatch(
            f"{where} computes wrong numbers in {answers.blocks}: {case}: off by {error:.2g} of a row's length, where "
            f"{tolerance:.2g} is allowed; refusing to serve with it; another driver may be right",
            block=f"block_{answers.first_block}",
        )


def row_error(found: NDArray[Any], right: NDArray[Any]) -> float:
    """How far the worst row is off, as a part of its length; what has no rows (a page) is one."""
    shape = right.shape if right.ndim == 2 else (1, -1)
    wide = right.astype(np.float64).reshape(shape)
    off = np.linalg.norm(found.astype(np.float64).reshape(shape) - wide, axis=1)
    return float((off / np.maximum(np.linalg.norm(wide, axis=1), 1e-30)).max())

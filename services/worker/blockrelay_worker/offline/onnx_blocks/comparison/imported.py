"""Runs imported blocks on the inputs of the original ones, one block at a time, and measures the differences."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.model import FLOATS
from blockrelay.host.cpu import cores
from blockrelay.onnx_blocks.reports.importing import ComparedBlock, ComparedPlaces
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.loader import executors_for
from blockrelay_worker.execution.onnx.known_answers import TOLERANCES, worst
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.offline.onnx_blocks.comparison.originals import RecordedPrompt

F32 = NDArray[np.float32]
#: Share of a row that its dtype may round away when a block adds to it: so a block that adds little does not fail.
_ROUNDING = {"float32": 2.0**-20, "float16": 2.0**-10}


def compare_blocks(
    folder: BlockFolder, places: ComparedPlaces, recorded: Sequence[RecordedPrompt], files: Sequence[str]
) -> Iterator[ComparedBlock]:
    """Compares all blocks in order, and yields a result for each, up to the first that differs too much.

    `recorded` has the originals' tensors at `places`, for at least one prompt. `files` are the originals' file names,
    in the order of their blocks. `folder` has the imported blocks, in fp32 or fp16. Raises BlockFolderError for a block
    that cannot be loaded, and ExecutionError if a block cannot run or ONNX Runtime has no usable library.
    """
    executors = executors_for(folder, threads=cores())
    longest = max(one.prompt.length for one in recorded)
    for index in range(1, folder.model.blocks + 1):
        executor = executors.load(folder, index, index, pages=pages_for(longest))
        try:
            block = _compared(folder, index, executor, places, recorded, files)
        finally:
            executor.close()
        yield block
        if block.problem:
            return


def _compared(
    folder: BlockFolder,
    index: int,
    executor: Executor,
    places: ComparedPlaces,
    recorded: Sequence[RecordedPrompt],
    files: Sequence[str],
) -> ComparedBlock:
    """Runs one imported block on all prompts and compares rows or logits, keys and values with the originals'."""
    dtype = FLOATS[folder.manifest.precision_of(index)]
    assert dtype in ("float16", "float32")
    tolerance, rounding = TOLERANCES[dtype], _ROUNDING[dtype]
    layer = None if index == folder.model.blocks else places.layers[index - 1]
    of_rows = (places.logits,) if layer is None else layer.hidden
    rows_are = "logits" if layer is None else "hidden rows"
    errors: dict[str, float] = {}

    def note(what: str, actual: F32, right: F32, base: F32 | None = None) -> None:
        off = _furthest(actual, right, base, rounding / tolerance) / tolerance
        errors[what] = worst((errors.get(what, 0.0), off))

    for one in recorded:
        given = None if index == 1 else one.rows(places.layers[index - 2].hidden)
        made, caches = _run(executor, one, given)
        before = _embedded(folder, one) if given is None else given
        for step, right in enumerate(one.rows(of_rows)):
            note(rows_are, made[step], right, None if layer is None else before[step])
        if layer is not None:
            for what, actual, place in zip(("keys", "values"), caches, (layer.keys, layer.values), strict=True):
                note(what, actual, one.cache(place))
    caches_at = {} if layer is None else {"keys": layer.keys, "values": layer.values}
    problem = ""
    for what, place in {**caches_at, rows_are: of_rows[-1]}.items():
        if not errors[what] <= 1:  # also true for NaN
            part = "what the block adds to its rows" if what == "hidden rows" else "their length"
            problem = (
                f"{files[place.block - 1]}: {place.tensor}: the {what} of the imported block_{index} are others: off "
                f"by {errors[what] * tolerance:.2g} of {part}, where {tolerance:g} is allowed; the graph computes "
                "something else than a Llama with these weights, and is not imported"
            )
            break
    return ComparedBlock(f"block_{index}", errors, problem)


def _run(executor: Executor, one: RecordedPrompt, given: Sequence[F32] | None) -> tuple[list[F32], tuple[F32, ...]]:
    """Runs one imported block on all steps of a prompt; `given` are its input rows, None for the first block.

    Returns the rows or logits of each step, and the KV caches (see `_caches`).
    """
    prompt = one.prompt
    pages = executor.pool.allocate(pages_for(prompt.length))
    rows: list[F32] = []
    for step, (first, end) in enumerate(prompt.spans):
        output = executor.run(
            Batch(
                segments=[Segment(rows=end - first, first_position=first, pages=pages)],
                tokens=prompt.steps[step].astype(np.int32) if given is None else None,
                hidden=None if given is None else np.ascontiguousarray(given[step]),
                wanted=range(end - first) if executor.gives_logits else (),
            )
        )
        made = output.logits if executor.gives_logits else output.hidden
        assert made is not None
        rows.append(made.copy())
    caches = _caches(executor, pages, prompt.length)
    executor.pool.free(pages)
    return rows, caches


def _caches(executor: Executor, pages: Sequence[int], length: int) -> tuple[F32, ...]:
    """Keys and values of the first `length` tokens, each [length, heads * head_dim]; none for the head alone."""
    keys: list[F32] = []
    values: list[F32] = []
    for layers in executor.export_pages(pages):
        for key, value in layers:  # [heads, head_dim, 16] and [heads, 16, head_dim]
            keys.append(key.astype(np.float32).transpose(2, 0, 1).reshape(key.shape[2], -1))
            values.append(value.astype(np.float32).transpose(1, 0, 2).reshape(value.shape[1], -1))
    if not keys:
        return ()
    return np.concatenate(keys)[:length], np.concatenate(values)[:length]


def _embedded(folder: BlockFolder, one: RecordedPrompt) -> list[F32]:
    table = folder.tensors(1)["embedding"]
    return [table[step].astype(np.float32) for step in one.prompt.steps]


def _furthest(actual: F32, right: F32, base: F32 | None, rounding: float) -> float:
    """The distance of the worst row in `actual` from that in `right`, as a share of its length.

    With `base` it is a share of the row's distance from `base`, plus `rounding` times its length. NaN or infinite
    if a number is not finite; infinite for another shape.
    """
    if actual.shape != right.shape:
        return float("inf")
    wide = right.astype(np.float64)
    length = np.linalg.norm(wide, axis=1)
    scale = length if base is None else np.linalg.norm(wide - base, axis=1) + rounding * length
    off = np.linalg.norm(actual - wide, axis=1)
    return float((off / np.maximum(scale, 1e-30)).max())

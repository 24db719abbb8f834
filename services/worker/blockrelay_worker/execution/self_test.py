"""Known answers: hashes of the output that every block must give for a fixed input on every machine, and their check.

    python -m blockrelay_worker.execution.self_test FOLDER [BLOCK...]      prints {"block_1": "<SHA-256>"}, a line per
                                                                           block as it is done, for the converter

The converter stores them. A worker computes them at start, with the code that it will serve with, and refuses to serve
on a difference. A matmul that saturates (uint8 x int8 on CPUs without VNNI) is wrong in a way that no comparison with
itself can show. The same check chooses the variant of the linear layers.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator

import numpy as np

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.block_folder.model import ModelConfig, is_exact
from blockrelay.errors import BlockrelayError
from blockrelay.exit_codes import FAILED, exit_code
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.kernels.reference import ReferenceKernels

#: Rows of the fixed input: one more than a KV page has.
ROWS = 17
#: Rows of the two chunks: the second one begins inside a page and ends in the next.
CHUNKS = (9, 8)
#: Odd and near 2**32 divided by the golden ratio: multiples modulo 2**32 spread evenly (Knuth, TAOCP 6.4).
_SPREAD = 2654435769


def fixed_tokens(model: ModelConfig, rows: int = ROWS) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Returns the fixed input of block 1: token ids, int32 [rows]."""
    indexes = np.arange(1, rows + 1, dtype=np.uint64) * np.uint64(_SPREAD) % np.uint64(2**32)
    return (indexes % np.uint64(model.vocab_size)).astype(np.int32)


def fixed_rows(model: ModelConfig, rows: int = ROWS) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Returns the fixed input of the other blocks: float32 [rows, H], even in [-1, 1) times a power of two per row.

    Evenly spread values reach every uint8 level after quantisation, both ends included. They are made with exact
    operations only, so that every machine has the same input.
    """
    indexes = np.arange(rows * model.hidden_size, dtype=np.uint64) * np.uint64(_SPREAD) % np.uint64(2**32)
    unit = (indexes >> np.uint64(8)).astype(np.float32) * np.float32(2**-23) - np.float32(1)
    magnitude = np.ldexp(np.float32(1), np.arange(rows) % 5 - 2)
    return unit.reshape(rows, model.hidden_size) * magnitude[:, None]


def answer(executor: StageExecutor, block: int) -> str:
    """Returns the SHA-256 (hex) of the output of `block` for the fixed input.

    It takes two pages of the executor's pool, and frees them. Raises OutOfPages if fewer are free, and ExecutionError
    if the block fails.
    """
    model = executor.folder.model
    pages = executor.pool.allocate(2)
    digest = hashlib.sha256()
    try:
        first = 0
        for rows in CHUNKS:
            part = slice(first, first + rows)
            output = executor.run_block(
                block,
                Batch(
                    segments=[Segment(rows=rows, first_position=first, pages=pages)],
                    tokens=fixed_tokens(model)[part] if block == 1 else None,
                    hidden=None if block == 1 else fixed_rows(model)[part],
                    wanted=range(rows),
                ),
            )
            result = output.hidden if output.logits is None else output.logits
            assert result is not None
            digest.update(result.astype("<f4").tobytes())
            first += rows
    finally:
        executor.pool.free(pages)
    return digest.hexdigest()


def first_mismatch(executor: StageExecutor, blocks: Iterable[int] | None = None) -> str | None:
    """Returns the name of the first of `blocks` (None: all of the stage) that does not give its known answer, or None.

    Blocks without a stored answer are skipped. Takes pages and raises errors as `answer` does.
    """
    for block in range(executor.first_block, executor.last_block + 1) if blocks is None else blocks:
        spec = executor.folder.manifest.block(block)
        if spec.known_answer is not None and answer(executor, block) != spec.known_answer:
            return spec.name
    return None


def known_answers(folder: BlockFolder, blocks: Iterable[int] | None = None) -> Iterator[tuple[str, str]]:
    """Yields (block name, answer) of those of `blocks` whose precision is exact (None: of all blocks).

    They are computed with NumPy and reference kernels, one block in memory at a time. Blocks of other precisions do not
    give the same bits everywhere. Raises BlockFolderError for a block that cannot be loaded, and ExecutionError for one
    that cannot be computed.
    """
    for block in range(1, folder.model.blocks + 1) if blocks is None else blocks:
        if not is_exact(folder.manifest.precision_of(block)):
            continue
        executor = StageExecutor(folder, block, block, pages=2, threads=1, kernels=ReferenceKernels(), backend="exact")
        yield f"block_{block}", answer(executor, block)
        executor.close()


def main(arguments: list[str]) -> int:
    """Runs the command line; returns the exit code."""
    blocks = [int(one) for one in arguments[1:] if one.isdecimal() and int(one) > 0]
    if not arguments or len(blocks) != len(arguments) - 1:
        sys.stderr.write("usage: python -m blockrelay_worker.execution.self_test FOLDER [BLOCK...]\n")
        return 2
    try:
        folder = open_block_folder(arguments[0], known_answers=False, blocks=blocks or None)
        for name, digest in known_answers(folder, [folder.manifest.block(one).index for one in blocks] or None):
            sys.stdout.write(json.dumps({name: digest}) + "\n")
            sys.stdout.flush()
    except BlockrelayError as error:
        sys.stderr.write(f"{error}\n")
        return exit_code(error, otherwise=FAILED)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

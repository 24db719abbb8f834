"""Loads stages that several processes of this host compute together (`execution.ranks`)."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from blockrelay.block_folder.folder import BlockFolder, check_blocks
from blockrelay.block_folder.manifest import Manifest
from blockrelay.block_folder.model import is_exact
from blockrelay.errors import DeviceLost, ExecutionError, UsageError
from blockrelay.host.cpu import cores
from blockrelay_worker.execution.cpu.loading import block_bytes, mismatch
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.execution.numerics_id import numerics_id
from blockrelay_worker.execution.ranks.group import RankGroup
from blockrelay_worker.execution.ranks.numa import bind
from blockrelay_worker.execution.ranks.shares import cut
from blockrelay_worker.execution.self_test import first_mismatch
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.kernels.libraries import shortcoming

#: Loads in a row that a rank may not survive; then the worker ends, and what has started it waits before the next.
_TRIES = 3


class SharedExecutors:
    """Factory of executors whose stages `ranks` processes share, with `threads` threads each.

    Implements `loader.Executors`. No stage shares blocks with another one.
    """

    nondeterministic: ClassVar[bool] = False

    def __init__(self, folder: BlockFolder, *, ranks: int, threads: int, others: Sequence[BlockFolder] = ()) -> None:
        """For `folder` and `others` of the same model. Binds this process, which is rank 0, to its NUMA node.

        Raises UsageError for more ranks than processor cores, for a number that does not fit the model, for float
        precisions, and where our kernels were not compiled.
        """
        if ranks > cores():
            raise UsageError(f"tensor_parallel {ranks}: there are {cores()} cores for ranks; take at most as many")
        cut(folder.model, ranks)
        for each in (folder, *others):
            _check_exact(each, range(1, folder.model.blocks + 1))
        bind(0, ranks)
        self._ranks, self._threads, self._kernels = ranks, threads, load_kernels(threads)
        self._failures = 0  # loads in a row that a rank did not survive
        self._loading: set[RankGroup] = set()
        if not self._kernels.has_matmul:
            raise UsageError(f"tensor_parallel needs our compiled kernels: leave it out; {shortcoming()}")

    def numerics_id(self, manifest: Manifest) -> str:
        """Returns the numerics id, which is that of every executor of this model on CPUs."""
        return numerics_id(manifest)

    def load(self, folder: BlockFolder, first_block: int, last_block: int, *, pages: int) -> StageExecutor:
        """Loads a verified executor with `pages` KV pages, at least two, and starts the other ranks.

        Raises KnownAnswerMismatch for a block that computes other bits, BlockFolderError for blocks that the folder
        lacks or that cannot be loaded, UsageError for float precisions, ExecutionError for what cannot be computed
        here. Raises DeviceLost for a rank that ended: it may be tried again, until it raises ExecutionError.
        """
        blocks = range(max(1, first_block), min(last_block, folder.model.blocks) + 1)
        _check_exact(folder, blocks)
        check_blocks(folder, list(blocks))
        try:
            executor = self._verified(folder, first_block, last_block, pages=max(2, pages))
        except OSError as error:
            raise ExecutionError(f"the system starts no process for a rank: {error}") from error
        except DeviceLost as lost:
            self._failures += 1
            if self._failures < _TRIES:
                raise
            raise ExecutionError(f"{lost}, {_TRIES} times in a row while a stage was loaded") from lost
        self._failures = 0
        return executor

    def _verified(self, folder: BlockFolder, first_block: int, last_block: int, *, pages: int) -> StageExecutor:
        """Returns a loaded executor that gives its known answers. Raises DeviceLost if a rank ends meanwhile."""
        group = RankGroup(
            folder,
            cut(folder.model, self._ranks),
            first=first_block,
            last=last_block,
            pages=pages,
            threads=self._threads,
            kernels=self._kernels,
        )
        self._loading.add(group)
        try:
            executor = StageExecutor(
                folder,
                first_block,
                last_block,
                pages=pages,
                threads=self._threads,
                kernels=self._kernels,
                backend="native",
                group=group,
            )
            wrong = first_mismatch(executor, range(first_block, last_block + 1))
            if wrong is not None:
                raise mismatch(folder, wrong, self._kernels)
            group.is_verified()
        except BaseException:
            group.close()
            raise
        finally:
            self._loading.discard(group)
        return executor

    def abandon(self) -> None:
        """Ends a load that is under way, in whichever thread, with DeviceLost. Any thread may call it."""
        for group in list(self._loading):
            group.abandon()

    def bytes_to_load(self, manifest: Manifest, first_block: int, last_block: int) -> int:
        """Returns the bytes of memory that these blocks take, in all ranks together."""
        return sum(block_bytes(manifest, index) for index in range(first_block, last_block + 1))


def _check_exact(folder: BlockFolder, blocks: Iterable[int]) -> None:
    """Raises UsageError for float blocks: their products would have other bits in another rank."""
    if any(not is_exact(folder.manifest.precision_of(index)) for index in blocks):
        raise UsageError(
            f"tensor_parallel is for w8a8 and w4a8, and {folder.root} is {folder.manifest.precision}: leave it out, or "
            "convert the model again"
        )

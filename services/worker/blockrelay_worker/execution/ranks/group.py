"""The ranks of a stage beside this process: processes that are started, loaded, commanded, and ended with the stage."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from typing import Any, cast, final

import msgpack
import numpy as np

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import BlockFolderError, DeviceLost, ExecutionError, UsageError
from blockrelay.host.child_command import how_it_ended
from blockrelay.observability.logs import get
from blockrelay_worker.execution.executor import PageContent
from blockrelay_worker.execution.page_layout import PageLayout, layout_of
from blockrelay_worker.execution.page_pool import PagePool
from blockrelay_worker.execution.ranks.command import Command
from blockrelay_worker.execution.ranks.memory import GroupMemory, SharedFile
from blockrelay_worker.execution.ranks.numa import bind
from blockrelay_worker.execution.ranks.shared_communicator import SharedCommunicator
from blockrelay_worker.execution.ranks.shares import Cut
from blockrelay_worker.execution.ranks.version import VERSION
from blockrelay_worker.kernels.arguments import F32
from blockrelay_worker.kernels.interface import Kernels
from blockrelay_worker.policy import LOAD_LIMIT_S, RANK_MAX_ROWS

_MODULE = "blockrelay_worker.execution.ranks"
#: Seconds that a rank may take to end by itself when its stage is closed.
_END_S = 2.0
#: Errors by which a rank refuses to load; others are ExecutionError.
_REFUSALS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (BlockFolderError, UsageError, MemoryError)}


@final
class RankGroup:
    """The other ranks of one stage, from 1 on. It makes rank 0's part of what they share.

    When one of them ends, all waits end at once with ExecutionError, `lost` is set, and `when_lost` is called from a
    thread of the group.
    """

    def __init__(
        self,
        folder: BlockFolder,
        cut: Cut,
        *,
        first: int,
        last: int,
        pages: int,
        threads: int,
        kernels: Kernels,
    ) -> None:
        """For the blocks `first` to `last`, and batches of RANK_MAX_ROWS rows at most. `start` starts the processes.

        Raises UsageError on systems without the shared memory, OSError or MemoryError if there is none now.
        """
        self.cut = cut
        layout = layout_of(folder, first, last)
        self.memory = GroupMemory(SharedFile(), cut, layout, pages=pages, capacity=RANK_MAX_ROWS)
        self.communicator = SharedCommunicator(self.memory, cut, kernels)
        self.pages = GroupPages(self.memory, cut, layout, pages)
        self.lost: DeviceLost | None = None
        self.when_lost: Callable[[], None] = lambda: None
        self._closed = False
        self._too_slow = threading.Timer(LOAD_LIMIT_S, self._end_slow_ranks)
        self._too_slow.daemon = True
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watchers: list[threading.Thread] = []
        self._others = range(1, len(cut.shares))
        self._begun = {
            "version": VERSION, "file": self.memory.file.descriptor, "ranks": len(cut.shares), "threads": threads,
            "isa": kernels.isa, "folder": str(folder.root.absolute()), "first": first, "last": last, "pages": pages,
            "capacity": RANK_MAX_ROWS,
        }  # fmt: skip

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of the processes, from rank 1 on."""
        return tuple(process.pid for process in self._processes)

    def start(self) -> None:
        """Starts the ranks, which load their shares, after all places were taken from the memory's file.

        They are killed unless `is_verified` is called within LOAD_LIMIT_S. Raises OSError if one cannot be started.
        """
        self._too_slow.start()
        try:
            for rank in self._others:
                started: Future[subprocess.Popen[bytes]] = Future()
                watcher = threading.Thread(target=self._host, args=(rank, started), name=f"rank {rank}", daemon=True)
                watcher.start()
                self._watchers.append(watcher)
                self._processes.append(started.result())
        except BaseException:
            self.close()
            raise
        finally:
            self.memory.file.close()

    def wait_until_loaded(self) -> None:
        """Waits until all ranks have loaded their shares.

        Raises BlockFolderError for blocks that cannot be loaded, UsageError for a rank of another version, DeviceLost
        for one that ended, MemoryError for one that lacks memory.
        """
        for rank in self._others:
            try:
                answer: dict[str, Any] = self.communicator.receive(rank)
            except ExecutionError as error:
                raise self.failed(error) from error
            if "refused" in answer:
                raise _REFUSALS.get(answer["type"], ExecutionError)(f"rank {rank}: {answer['refused']}")

    def is_verified(self) -> None:
        """Ends the time limit of loading: from now on, the worker limits the time of each step."""
        self._too_slow.cancel()

    def begin(self, command: Command, x: F32, wanted: Sequence[int]) -> None:
        """Has the other ranks run a step on x [rows, H]; `wanted` are the rows whose logits are wanted.

        Raises ExecutionError when one of them is gone.
        """
        self.memory.input(*x.shape)[...] = x
        self.memory.wanted(len(wanted))[...] = np.asarray(wanted, np.int32)
        for rank in self._others:
            self.communicator.send(rank, asdict(command))

    def failed(self, error: Exception) -> DeviceLost:
        """Ends all ranks after a step that failed in this one: they wait for it. Returns why the group is lost."""
        self.communicator.break_up()
        if self.lost is None:
            self.lost = DeviceLost(f"rank 0 failed: {error}", reason="rank_ended", code="INTERNAL")
        return self.lost

    def abandon(self) -> None:
        """Kills the ranks at once. A thread that loads the stage, or waits for a step, gets an error."""
        for process in self._processes:
            process.kill()
        self.communicator.break_up()

    def close(self) -> None:
        """Ends the ranks and waits for that."""
        self._closed = True
        self._too_slow.cancel()
        self.communicator.break_up()
        self.memory.file.close()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
                continue
            process.kill()
        for watcher in self._watchers:
            watcher.join()

    def _end_slow_ranks(self) -> None:
        """Ends a group that was not loaded in time: a rank hangs, or the machine is far too slow."""
        get().error("RANKS_TOO_SLOW", seconds=LOAD_LIMIT_S)
        self.abandon()

    def _host(self, rank: int, started: "Future[subprocess.Popen[bytes]]") -> None:
        """Starts a rank and watches it until it has ended. Linux kills it when the thread that started it ends.

        The process gets the processors of this thread: its node's, while the thread of rank 0 is bound to its own.
        """
        command = [sys.executable, "-P", "-m", _MODULE, str(os.getpid())]
        try:
            bind(rank, 1 + len(self._others))
            process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[self.memory.file.descriptor])
        except BaseException as error:  # noqa: BLE001 `start` raises it
            started.set_exception(error)
            return
        assert process.stdin is not None, "it has a pipe"
        with suppress(OSError):  # it has ended already, which is seen below
            process.stdin.write(cast(bytes, msgpack.packb(self._begun | {"rank": rank})))
            process.stdin.close()
        started.set_result(process)
        status = process.wait()
        if not self._closed and self.lost is None:
            self.lost = DeviceLost(
                f"rank {rank} has ended {how_it_ended(status)}", reason="rank_ended", code="INTERNAL"
            )
            get().error("RANK_ENDED", rank=rank, error=str(self.lost))
        self.communicator.break_up()
        if not self._closed:
            self.when_lost()


class GroupPages:
    """The KV pages of a stage, whose heads are spread over ranks. Implements `PageOwner`."""

    def __init__(self, memory: GroupMemory, cut: Cut, layout: PageLayout, pages: int) -> None:
        self.layout, self.pool = layout, PagePool(layout, pages)
        self._holders = [(share.kv_heads, own) for share, own in zip(cut.shares, memory.kv, strict=True)]
        mine = memory.kv[cut.rank]
        #: Rank 0's own, by layer.
        self.k_pages, self.v_pages = mine.k_pages, mine.v_pages

    def export_pages(self, pages: Sequence[int]) -> list[PageContent]:
        """Returns copies of the pages with the heads of all ranks."""
        distinct = [own for at, (heads, own) in enumerate(self._holders) if not at or self._holders[at - 1][0] != heads]
        layers = range(self.layout.layers)
        return [
            [
                (
                    np.concatenate([own.k_pages[layer][page] for own in distinct]),
                    np.concatenate([own.v_pages[layer][page] for own in distinct]),
                )
                for layer in layers
            ]
            for page in pages
        ]

    def import_pages(self, pages: Sequence[int], contents: Sequence[PageContent]) -> None:
        """Writes whole pages: each rank gets its heads."""
        for page, layers in zip(pages, contents, strict=True):
            for layer, (keys, values) in enumerate(layers):
                for heads, own in self._holders:
                    own.k_pages[layer][page] = keys[heads.start : heads.stop]
                    own.v_pages[layer][page] = values[heads.start : heads.stop]

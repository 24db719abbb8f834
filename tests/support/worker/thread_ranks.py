"""Ranks as threads of one process, which exchange arrays by NumPy: what `execution.ranks` does without processes."""

import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay_worker.execution.batch import Segment
from blockrelay_worker.execution.cpu.block_calls import BlockCalls, Step
from blockrelay_worker.execution.cpu.layers import Layer, load_block
from blockrelay_worker.execution.cpu.linears import Backend, Computation
from blockrelay_worker.execution.cpu.page_memory import PageMemory
from blockrelay_worker.execution.cpu.slot_mapping import place
from blockrelay_worker.execution.cpu.workspace import Workspace
from blockrelay_worker.execution.page_layout import layout_of
from blockrelay_worker.execution.ranks.communicator import Communicator, Turn
from blockrelay_worker.execution.ranks.shares import Cut, Exchanged, cut
from blockrelay_worker.kernels.arguments import F32
from blockrelay_worker.kernels.interface import Kernels


@dataclass
class Table:
    """The meeting point of the threads that are the ranks of one stage."""

    barrier: threading.Barrier
    parts: dict[int, F32] = field(default_factory=dict[int, F32])
    messages: defaultdict[tuple[int, int], "SimpleQueue[Any]"] = field(default_factory=lambda: defaultdict(SimpleQueue))


@final
class ThreadCommunicator(Communicator):
    """`Communicator` of a rank that is a thread."""

    def __init__(self, table: Table, rank: int, kernels: Kernels) -> None:
        super().__init__(rank, kernels)
        self._table = table

    def part(self, turn: Turn, own: F32) -> F32:
        return np.empty_like(own)

    def all_gather(self, turn: Turn, part: F32, kind: Exchanged, out: F32) -> F32:
        self._table.parts[self.rank] = part
        self._table.barrier.wait()
        np.concatenate([self._table.parts[rank] for rank in range(self._table.barrier.parties)], axis=1, out=out)
        self._table.barrier.wait()
        return out

    def meet(self) -> None:
        self._table.barrier.wait()

    def send(self, to: int, message: Any) -> None:
        self._table.messages[self.rank, to].put(message)

    def receive(self, sender: int) -> Any:
        return self._table.messages[sender, self.rank].get()


def logits_of_threads(
    folder: BlockFolder, tokens: Sequence[int], *, ranks: int, kernels: Kernels, backend: Backend
) -> NDArray[np.float32]:
    """The logits of every position of a prompt, computed in one step by ranks that are threads."""
    table = Table(threading.Barrier(ranks))

    def one(parts: Cut) -> NDArray[np.float32]:
        model, together = folder.model, ThreadCommunicator(table, parts.rank, kernels)
        by = Computation(kernels=kernels, backend=backend, threads=1, cut=parts, ranks=together)
        loaded = {index: load_block(folder, index, by) for index in range(1, model.blocks + 1)}
        layout = replace(layout_of(folder, 1, model.blocks), kv_heads=len(parts.mine.kv_heads))
        memory, space = PageMemory(layout, 8), Workspace(model, len(tokens))
        cos, sin = folder.rotary()
        rows = place([Segment(rows=len(tokens), first_position=0, pages=range(8))], space, cos, sin, keeps_pages=True)
        first = loaded[1]
        assert isinstance(first, Layer) and first.embedding is not None
        x = space.hidden(len(tokens), model.hidden_size)
        x[...] = first.embedding[list(tokens)]
        logits = np.empty((len(tokens), model.vocab_size), np.float32)
        calls = BlockCalls(loaded, memory.k_pages, memory.v_pages, kernels)
        calls.program(Step(x, rows, range(len(tokens)), logits, space, 1, model.blocks)).run([])
        return logits

    with ThreadPoolExecutor(ranks) as threads:
        found = list(threads.map(one, [cut(folder.model, ranks, rank) for rank in range(ranks)]))
    return found[0]

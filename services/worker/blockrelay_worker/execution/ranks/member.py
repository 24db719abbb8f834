"""A rank from 1 on: it loads its share of a stage and computes what rank 0 announces, until the group breaks up."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.errors import BlockrelayError, ExecutionError, UsageError
from blockrelay_worker.execution.cpu.block_calls import BlockCalls, Step
from blockrelay_worker.execution.cpu.layers import load_block
from blockrelay_worker.execution.cpu.linears import Computation
from blockrelay_worker.execution.cpu.slot_mapping import SlotMapping, owners
from blockrelay_worker.execution.cpu.workspace import Workspace
from blockrelay_worker.execution.page_layout import layout_of
from blockrelay_worker.execution.ranks.command import Command
from blockrelay_worker.execution.ranks.memory import GroupMemory, SharedFile
from blockrelay_worker.execution.ranks.shared_communicator import SharedCommunicator
from blockrelay_worker.execution.ranks.shares import cut
from blockrelay_worker.execution.ranks.version import VERSION
from blockrelay_worker.kernels import load_kernels


class Member:
    """A rank of one stage: its share of the blocks, and the memory that it shares with the others."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        """`given` are the fields that `RankGroup` sends: the rank, the stage and the file of the shared memory."""
        self._given = given
        self._folder = open_block_folder(Path(given["folder"]), blocks=())
        self._kernels = load_kernels(given["threads"], isa=given["isa"])
        self._cut = cut(self._folder.model, given["ranks"], given["rank"])
        layout, file = layout_of(self._folder, given["first"], given["last"]), SharedFile(given["file"])
        self._memory = GroupMemory(file, self._cut, layout, pages=given["pages"], capacity=given["capacity"])
        self._space = Workspace(self._folder.model, given["capacity"], file.take)
        self._cos, self._sin = self._folder.rotary()
        self.ranks = SharedCommunicator(self._memory, self._cut, self._kernels)
        self._calls: BlockCalls | None = None

    def load(self) -> None:
        """Loads the share. Raises UsageError for a rank of another release than its worker; and as `load_block`."""
        if self._given["version"] != VERSION:
            raise UsageError(
                f"this process is of another release ({VERSION}) than its worker ({self._given['version']}): start the "
                "worker again"
            )
        by = Computation(kernels=self._kernels, backend="native", threads=1, cut=self._cut, ranks=self.ranks)
        numbers = range(self._given["first"], self._given["last"] + 1)
        blocks = {number: load_block(self._folder, number, by) for number in numbers}
        own = self._memory.kv[self._cut.rank]
        self._calls = BlockCalls(blocks, own.k_pages, own.v_pages, self._kernels)

    def step(self, command: Command) -> None:
        """Computes this rank's part of a step, whose rows rank 0 has placed. Raises ExecutionError when it fails."""
        assert self._calls is not None, "it was loaded"
        model, space = self._folder.model, self._space
        x = space.hidden(command.rows, model.hidden_size)
        x[...] = self._memory.input(*x.shape)
        positions, page, slot = space.indexes(command.rows)
        segments = space.segments(command.segments)
        rows = SlotMapping(
            positions=positions, page=page, slot=slot, page_table=space.page_table(command.segments, command.pages),
            segments=segments, owner=owners(segments), cos=self._cos, sin=self._sin,
        )  # fmt: skip
        wanted = self._memory.wanted(command.wanted).tolist()
        # Rank 0 gets the logits: here they are a shape.
        logits = np.empty((command.wanted, model.vocab_size), np.float32) if command.last == model.blocks else None
        with np.errstate(all="ignore"):
            step = Step(x, rows, wanted, logits, space, command.first, command.last)
            self._calls.program(step).run([])
        self.ranks.meet()


def main() -> int:
    """Runs the rank that standard input describes, and returns its exit code: 0 when the group has broken up."""
    given: dict[str, Any] = msgpack.unpackb(sys.stdin.buffer.read())
    member = Member(given)
    try:
        member.load()
    except (BlockrelayError, MemoryError) as error:
        member.ranks.send(0, {"refused": str(error) or "not enough memory", "type": type(error).__name__})
        return 0
    member.ranks.send(0, {})
    try:
        while True:
            member.step(Command(**member.ranks.receive(0)))
    except ExecutionError:
        if member.ranks.is_broken:
            return 0
        raise

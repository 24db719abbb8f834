"""A rank from 1 on: it loads its share of a stage and computes what rank 0 announces, until the group breaks up."""

import sys
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.errors import BlockrelayError, ExecutionError, UsageError
from blockrelay_worker.execution.cpu.block_calls import BlockCalls
from blockrelay_worker.execution.cpu.layers import load_block
from blockrelay_worker.execution.cpu.slot_mapping import SlotMapping, owners
from blockrelay_worker.execution.cpu.workspace import Workspace
from blockrelay_worker.execution.page_layout import layout_of
from blockrelay_worker.execution.ranks.command import Command
from blockrelay_worker.execution.ranks.memory import GroupMemory, SharedFile
from blockrelay_worker.execution.ranks.shared_communicator import SharedCommunicator
from blockrelay_worker.execution.ranks.shares import cut
from blockrelay_worker.execution.ranks.version import VERSION
from blockrelay_worker.kernels import load_kernels


def main() -> int:
    """Runs the rank that standard input describes, and returns its exit code: 0 when the group has broken up."""
    given: dict[str, Any] = msgpack.unpackb(sys.stdin.buffer.read())
    folder = open_block_folder(Path(given["folder"]), blocks=())
    kernels = load_kernels(given["threads"], isa=given["isa"])
    parts = cut(folder.model, given["ranks"], given["rank"])
    layout = layout_of(folder, given["first"], given["last"])
    memory = GroupMemory(SharedFile(given["file"]), parts, layout, pages=given["pages"], capacity=given["capacity"])
    ranks = SharedCommunicator(memory, parts, kernels)
    space = Workspace(folder.model, given["capacity"], memory.file.take)
    try:
        if given["version"] != VERSION:
            raise UsageError(
                f"this process is of another release ({VERSION}) than its worker ({given['version']}): start the "
                "worker again"
            )
        blocks = {
            index: load_block(folder, index, parts, ranks, backend="native", threads=1, kernels=kernels)
            for index in range(given["first"], given["last"] + 1)
        }
    except (BlockrelayError, MemoryError) as error:
        ranks.send(0, {"refused": str(error) or "not enough memory", "type": type(error).__name__})
        return 0
    calls = BlockCalls(blocks, memory.kv[ranks.rank].k_pages, memory.kv[ranks.rank].v_pages, kernels)
    ranks.send(0, {})
    try:
        while True:
            _step(Command(**ranks.receive(0)), folder, calls, memory, space, ranks)
    except ExecutionError:
        if ranks.is_broken:
            return 0
        raise


def _step(
    command: Command,
    folder: BlockFolder,
    calls: BlockCalls,
    memory: GroupMemory,
    space: Workspace,
    ranks: SharedCommunicator,
) -> None:
    """Computes this rank's part of a step, whose rows rank 0 has placed."""
    model = folder.model
    x = space.hidden(command.rows, model.hidden_size)
    x[...] = memory.input(*x.shape)
    cos, sin = folder.rotary()
    positions, page, slot = space.indexes(command.rows)
    segments = space.segments(command.segments)
    rows = SlotMapping(
        positions=positions, page=page, slot=slot, page_table=space.page_table(command.segments, command.pages),
        segments=segments, owner=owners(segments), cos=cos, sin=sin,
    )  # fmt: skip
    wanted = memory.wanted(command.wanted).tolist()
    # Rank 0 gets the logits: here they are a shape.
    logits = np.empty((command.wanted, model.vocab_size), np.float32) if command.last == model.blocks else None
    with np.errstate(all="ignore"):
        calls.program(x, rows, wanted, logits, space, first=command.first, last=command.last).run([])
    ranks.meet()

"""The kernel calls by which loaded blocks compute a batch: recorded and kept for few rows, direct otherwise."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from blockrelay_worker.execution.cpu.layers import Block, Head, Layer
from blockrelay_worker.execution.cpu.slot_mapping import SlotMapping
from blockrelay_worker.execution.cpu.workspace import Workspace
from blockrelay_worker.kernels.arguments import F32, Pages
from blockrelay_worker.kernels.interface import Kernels, Linear, Program
from blockrelay_worker.kernels.recorded import Direct

#: Most rows for which calls are recorded (above, their overhead does not matter), and most programs that are kept.
_RECORDED_ROWS, _PROGRAMS = 64, 64


@dataclass(frozen=True, slots=True)
class Step:
    """A batch of R rows in the buffers of an executor, and the blocks that compute it."""

    x: F32
    """The residual stream [R, H], which layers change in place."""
    rows: SlotMapping
    wanted: Sequence[int]
    """The rows whose logits the head writes."""
    logits: F32 | None
    """The buffer of these logits [wanted, vocab]; None without the head."""
    space: Workspace
    first: int
    last: int
    """The first and the last block, both included."""


class BlockCalls:
    """The blocks of a stage, by number, with the KV pages of its layers. Not thread-safe."""

    def __init__(
        self, blocks: Mapping[int, Block], k_pages: Sequence[Pages], v_pages: Sequence[Pages], kernels: Kernels
    ) -> None:
        """`k_pages` and `v_pages` have an array for each layer, as `PageMemory` has them."""
        self._blocks, self._k_pages, self._v_pages, self._kernels = dict(blocks), k_pages, v_pages, kernels
        self._first = min(blocks)
        self._programs: dict[tuple[int, ...], Program] = {}
        self._recorded_rows = 0
        self.linears_changed()

    @property
    def linears(self) -> Iterator[Linear]:
        """The linear layers of all blocks."""
        for block in self._blocks.values():
            yield from block.linears.values()

    def linears_changed(self) -> None:
        """Drops recorded programs; to be called after a linear layer changed its backend."""
        self._programs.clear()
        rows = min((linear.recorded_rows for linear in self.linears), default=0)
        self._recorded_rows = min(_RECORDED_ROWS, rows) if self._kernels.records else 0

    def forget_buffers(self) -> None:
        """Drops references to buffers that are about to be replaced."""
        self._programs.clear()
        for linear in self.linears:
            linear.forget_buffers()

    def close(self) -> None:
        """Drops the blocks and the pages."""
        self.forget_buffers()
        self._blocks.clear()
        self._k_pages = self._v_pages = ()

    def program(self, step: Step) -> Program:
        """Returns the calls of a step, in a part for each block.

        Rows gathered for the head make a program direct: NumPy gathers them, and only kernel calls can be recorded.
        """
        count = step.rows.positions.size
        if count > self._recorded_rows or (step.logits is not None and len(step.wanted) != count):
            return Direct(self._parts(step))
        key = (step.first, step.last, *step.rows.shape)
        program = self._programs.get(key)
        if program is None:
            if len(self._programs) >= _PROGRAMS:
                self._programs.clear()
            program = self._programs[key] = self._kernels.record(self._parts(step))
        return program

    def _parts(self, step: Step) -> list[Callable[[], None]]:
        """Returns one call per block."""
        x, rows, logits, space = step.x, step.rows, step.logits, step.space
        chosen = np.asarray(step.wanted, np.intp)
        parts: list[Callable[[], None]] = []
        head_input = x
        for number in range(step.first, step.last + 1):
            match self._blocks[number]:
                case Layer() as layer:
                    pages = self._k_pages[number - self._first], self._v_pages[number - self._first]
                    if logits is not None and number + 1 == step.last and chosen.size < x.shape[0]:
                        head_input = space.wanted(chosen.size, x.shape[1])
                        parts.append(partial(layer.run_wanted, x, rows, space, *pages, chosen, head_input))
                    else:
                        parts.append(partial(layer.run, x, rows, space, *pages))
                case Head() as head:
                    if logits is not None:
                        parts.append(partial(head.run_wanted, head_input, chosen, space, logits))
        return parts

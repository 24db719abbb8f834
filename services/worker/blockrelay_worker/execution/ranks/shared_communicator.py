"""The communicator of ranks in processes of their own: through memory that they share, by the native kernels."""

from typing import Any, cast, final

import msgpack
import numpy as np

from blockrelay.errors import ExecutionError
from blockrelay_worker.execution.ranks.communicator import Communicator, Turn
from blockrelay_worker.execution.ranks.memory import MESSAGE_BYTES, GroupMemory, Mailbox
from blockrelay_worker.execution.ranks.shares import Cut, Exchanged
from blockrelay_worker.kernels.arguments import F32, U8
from blockrelay_worker.kernels.interface import Kernels, Value


@final
class SharedCommunicator(Communicator):
    """`Communicator` for `native` kernels. A program may record `all_gather`."""

    def __init__(self, memory: GroupMemory, cut: Cut, kernels: Kernels) -> None:
        super().__init__(cut.rank, kernels)
        self._memory, self._cut = memory, cut
        self._parts = [parts.view(np.float32) for parts in memory.parts[cut.rank]]
        self._addresses = [
            np.asarray([parts[turn].ctypes.data for parts in memory.parts], np.uint64) for turn in (0, 1)
        ]

    def part(self, turn: Turn, own: F32) -> F32:
        return self._parts[turn][: own.size].reshape(own.shape)

    def all_gather(self, turn: Turn, part: F32, kind: Exchanged, out: F32) -> F32:
        result = None if kind == "vocabulary" and self.rank else out
        self._kernels.call("gather", *self._gathered(turn, part, kind), result, *out.shape)
        return out

    def gather_quantise(
        self, turn: Turn, part: F32, kind: Exchanged, *, out: F32, hadamard: int = 0, group: int,
        u: U8, scale: F32,
    ) -> tuple[U8, F32]:  # fmt: skip
        self._kernels.call("gather_quantise", *self._gathered(turn, part, kind), u, scale, *u.shape, hadamard, group)
        return u, scale

    def gather_add(self, turn: Turn, part: F32, x: F32, row_scale: F32 | None, *, out: F32) -> None:
        self._kernels.call("gather_add_scaled", *self._gathered(turn, part, "hidden"), x, row_scale, *x.shape)

    def _gathered(self, turn: Turn, part: F32, kind: Exchanged) -> tuple[Value, ...]:
        """Returns the arguments of a native function that gathers a matrix."""
        widths = self._cut.widths[kind]
        assert part.shape[1] == widths[self.rank], "a rank has its own columns"
        return self._memory.meeting, self.rank, len(widths), self._addresses[turn], widths

    def meet(self) -> None:
        widths = self._cut.widths["hidden"]
        self._kernels.call(
            "gather", self._memory.meeting, self.rank, len(widths), self._addresses[0], widths, None, 0, 0
        )

    def send(self, to: int, message: Any) -> None:
        box = self._mailbox(to, self.rank)
        packed = cast(bytes, msgpack.packb(message))
        if len(packed) > MESSAGE_BYTES:
            raise ExecutionError(f"a message of {len(packed)} bytes is too long for another rank")
        number = _number(box.sent)
        self._wait(box.taken, number)
        box.content[: len(packed)] = np.frombuffer(packed, np.uint8)
        box.length[0] = len(packed)
        self._set(box.sent, number + 1)

    def receive(self, sender: int) -> Any:
        box = self._mailbox(self.rank, sender)
        number = _number(box.taken) + 1
        self._wait(box.sent, number)
        message = msgpack.unpackb(box.content[: int(box.length[0])].tobytes(), strict_map_key=False)
        self._set(box.taken, number)
        return message

    def break_up(self) -> None:
        """Has every wait of any rank end with an error, now and later. Any thread may call it."""
        self._set(self._memory.meeting, 1)

    @property
    def is_broken(self) -> bool:
        """Whether `break_up` was called, by any rank."""
        return _number(self._memory.meeting) != 0

    def _mailbox(self, to: int, sender: int) -> Mailbox:
        return self._memory.to_rank[to] if sender == 0 else self._memory.to_first[sender]

    def _wait(self, event: Any, number: int) -> None:
        """Waits until an event has counted to `number`, in short waits: signal handlers run between them."""
        while (number - _number(event)) % 2**32 in range(1, 2**31):
            self._kernels.call("wait_for_event", self._memory.meeting, event, number % 2**32)

    def _set(self, event: Any, number: int) -> None:
        self._kernels.call("set_event", event, number % 2**32)


def _number(event: Any) -> int:
    """Returns the number of an event, which other processes may change."""
    return int(event[:4].view(np.uint32)[0])

"""The interface by which the ranks of a stage exchange data. A rank alone needs none: `Alone`."""

from abc import ABC, abstractmethod
from typing import Any, Literal, final

from blockrelay_worker.execution.ranks.shares import Exchanged
from blockrelay_worker.kernels.arguments import F32, U8
from blockrelay_worker.kernels.interface import Kernels

#: The buffers into which a rank computes for the others, in turns: while slower ranks still read one, it writes the
#: other. Two matrices in a row that are exchanged have different ones.
Turn = Literal[0, 1]


class Communicator(ABC):
    """One rank's connection with the other ranks of its stage. One thread uses it.

    All ranks gather the same matrices in the same order. Methods raise ExecutionError when another rank is
    gone; nothing works afterwards.
    """

    def __init__(self, rank: int, kernels: Kernels) -> None:
        """`rank` is the number of this rank, from 0; `kernels` compute what it gathers."""
        self.rank, self._kernels = rank, kernels

    @abstractmethod
    def part(self, turn: Turn, own: F32) -> F32:
        """Returns the buffer into which this rank computes its columns of a matrix that `all_gather` takes next.

        It has the shape of `own`, which is a buffer of the caller that may be used.
        """

    @abstractmethod
    def all_gather(self, turn: Turn, part: F32, kind: Exchanged, out: F32) -> F32:
        """Returns the columns of all ranks side by side: of the widths of `kind`, float32 [rows, columns].

        `part` is the result of the last call of `part` with this `turn`, filled. `out` is a buffer for the result. Of
        `vocabulary`, rank 0 alone gets the result.
        """

    def gather_quantise(
        self, turn: Turn, part: F32, kind: Exchanged, *, out: F32, hadamard: int = 0, group: int,
        u: U8, scale: F32,
    ) -> tuple[U8, F32]:  # fmt: skip
        """Returns the rows of `all_gather`, quantised into `u` and `scale` as `Kernels.quantise` does.

        What is in `out` afterwards is not defined.
        """
        whole = self.all_gather(turn, part, kind, out)
        return self._kernels.quantise(whole, hadamard=hadamard, group=group, u=u, scale=scale)

    def gather_add(self, turn: Turn, part: F32, x: F32, row_scale: F32 | None, *, out: F32) -> None:
        """Adds the rows of `all_gather` (kind `hidden`) to x [R, H] as `Kernels.add_scaled` does; `out` as above."""
        self._kernels.add_scaled(x, self.all_gather(turn, part, "hidden", out), row_scale)

    @abstractmethod
    def meet(self) -> None:
        """Waits until all ranks have called it: what one wrote before, the others may read, and write over."""

    @abstractmethod
    def send(self, to: int, message: Any) -> None:
        """Sends a message of numbers, texts, lists and maps to another rank: rank 0 to any, and any to rank 0.

        It waits until that rank has taken the message before it. Raises ExecutionError for a message that is too long.
        """

    @abstractmethod
    def receive(self, sender: int) -> Any:
        """Returns the next message of another rank, for which it waits."""


@final
class Alone(Communicator):
    """A stage that one process computes: there is nothing to exchange."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(0, kernels)

    def part(self, turn: Turn, own: F32) -> F32:
        return own

    def all_gather(self, turn: Turn, part: F32, kind: Exchanged, out: F32) -> F32:
        return part

    def meet(self) -> None:
        pass

    def send(self, to: int, message: Any) -> None:
        raise AssertionError("there is no other rank")

    def receive(self, sender: int) -> Any:
        raise AssertionError("there is no other rank")

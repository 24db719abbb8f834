"""How long each block of a stage takes, whose blocks are one graph: it tells the time of all of them together.

Now and then the blocks run one by one, in sessions of their own on the same weights and pages, in the place of the one
graph: to the last digits the result is the same. What each took then divides the time of the steps that follow.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from blockrelay_worker.execution.onnx.bound.session import Arrays, BoundSession
from blockrelay_worker.execution.onnx.providers.provider import Place, Provider

#: Of so many steps one is measured.
EVERY = 256


class BlockTimes:
    """Of the blocks of one stage. Used as its stage is, by one thread at a time."""

    def __init__(
        self,
        provider: Provider,
        blocks: Sequence[int],
        session_of: Callable[[int], ort.InferenceSession],
        values: Mapping[str, Any],
        pools: Mapping[str, Any],
        *,
        always: bool,
    ) -> None:
        """`session_of` gives that of one block, which may be others' too. `values` are inputs of the graphs on the
        device by name, and so are `pools`, which the graphs write in place (`NAME_out`). `always`: every step is
        measured. Nothing else is done before the first one that is."""
        self._provider, self._blocks, self._session_of = provider, blocks, session_of
        self._values, self._pools, self._always = values, pools, always
        self._sessions: list[BoundSession] = []
        self._shares = np.full(len(blocks), 1 / len(blocks))
        self._steps = 1

    def measure_next(self) -> None:
        """Measure the next step, whatever its number."""
        self._steps = 0

    @property
    def due(self) -> bool:
        """Whether the next step is to be measured. One block alone has nothing to divide."""
        return self._always or (len(self._blocks) > 1 and self._steps % EVERY == 0)

    @contextmanager
    def each(self) -> Generator[None]:
        """Steps inside are measured, each of them."""
        before, self._always = self._always, True
        try:
            yield
        finally:
            self._always = before

    def divided(self, seconds: float) -> dict[str, float]:
        """A step of the one graph has taken so long: by block. An estimate, unless there is one block."""
        self._steps += 1
        return self._named(seconds * self._shares)

    def measured(
        self, inputs: Mapping[str, NDArray[Any]], stays: Mapping[str, Place] | None = None
    ) -> tuple[Arrays, dict[str, float]]:
        """A step block by block: outputs of the last one as of BoundSession, and the seconds of each."""
        ran = list(self.one_by_one(inputs, stays))
        found, seconds = ran[-1][1], [spent for *_, spent in ran]
        self._shares = np.asarray(seconds) / sum(seconds)
        self._steps += 1
        return found, self._named(seconds)

    def one_by_one(
        self, inputs: Mapping[str, NDArray[Any]], stays: Mapping[str, Place] | None = None
    ) -> Iterator[tuple[str, Arrays, float]]:
        """The name, the outputs and the seconds of each block, which is run when it is asked for; nothing is noted."""
        if not self._sessions:
            self._sessions = [self._session(block) for block in self._blocks]
        # Memory that stays for a step in 256 would be missing in all others.
        options = None if self._always else self._provider.shrinking()
        given = dict(inputs)
        for block, session in zip(self._blocks, self._sessions, strict=True):
            began = time.perf_counter()
            found = session.run(given, options, stays)
            yield f"block_{block}", found, time.perf_counter() - began
            given["hidden"] = found.get("hidden_out", given.get("hidden", _NO_ROWS))

    def close(self) -> None:
        """Drop the sessions."""
        self._sessions.clear()

    def _session(self, block: int) -> BoundSession:
        return BoundSession(self._session_of(block), self._values, self._pools)

    def _named(self, seconds: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
        return {f"block_{block}": float(one) for block, one in zip(self._blocks, seconds, strict=True)}


_NO_ROWS = np.empty((0, 0), np.float32)

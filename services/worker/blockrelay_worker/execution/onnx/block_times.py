"""The time of each block of a stage that runs as one graph, which shows only the time of all of them together.

Now and then the blocks run one by one instead, in sessions of their own on the same weights and KV pages; the result is
the same to the last digits. The shares of the blocks then divide the time of the steps that follow.
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

#: One step in this many is measured.
EVERY = 256


class BlockTimes:
    """The block times of one stage. Used by one thread at a time, like its stage."""

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
        """`session_of` returns the session of one block, which other stages may share. `values` and `pools` are inputs
        of the graphs on the device, by name; the graphs write the pools in place (`NAME_out`). `always`: every step is
        measured. Sessions are made for the first measured step."""
        self._provider, self._blocks, self._session_of = provider, blocks, session_of
        self._values, self._pools, self._always = values, pools, always
        self._sessions: list[BoundSession] = []
        self._shares = np.full(len(blocks), 1 / len(blocks))
        self._steps = 1

    def measure_next(self) -> None:
        """Makes the next step due, whatever its number. A single block stays as it is: see `due`."""
        self._steps = 0

    @property
    def due(self) -> bool:
        """True if the next step is to be measured. With a single block only if all steps are."""
        return self._always or (len(self._blocks) > 1 and self._steps % EVERY == 0)

    @contextmanager
    def each(self) -> Generator[None]:
        """Context in which every step is measured."""
        before, self._always = self._always, True
        try:
            yield
        finally:
            self._always = before

    def divided(self, seconds: float) -> dict[str, float]:
        """Returns the seconds of each block in a step of the whole graph: an estimate, unless there is one block.
        Counts the step."""
        self._steps += 1
        return self._named(seconds * self._shares)

    def measured(
        self, inputs: Mapping[str, NDArray[Any]], stays: Mapping[str, Place] | None = None
    ) -> tuple[Arrays, dict[str, float]]:
        """Runs a step block by block. Returns the outputs of the last block (see `BoundSession.run`) and the seconds of
        each block. Counts the step, and takes its shares for the next ones. Raises the errors of `one_by_one`."""
        ran = list(self.one_by_one(inputs, stays))
        outputs, seconds = ran[-1][1], [spent for *_, spent in ran]
        self._shares = np.asarray(seconds) / sum(seconds)
        self._steps += 1
        return outputs, self._named(seconds)

    def one_by_one(
        self, inputs: Mapping[str, NDArray[Any]], stays: Mapping[str, Place] | None = None
    ) -> Iterator[tuple[str, Arrays, float]]:
        """Runs each block when the iterator reaches it; yields its name, outputs and seconds. The shares do not
        change. Raises ONNX Runtime's error if a block cannot be loaded or fails."""
        if not self._sessions:
            self._sessions = [self._session(block) for block in self._blocks]
        # The arena must shrink: memory kept for one step in 256 would be missing in all others.
        options = None if self._always else self._provider.shrinking()
        given = dict(inputs)
        for block, session in zip(self._blocks, self._sessions, strict=True):
            began = time.perf_counter()
            outputs = session.run(given, options, stays)
            yield f"block_{block}", outputs, time.perf_counter() - began
            given["hidden"] = outputs.get("hidden_out", given.get("hidden", _NO_ROWS))

    def close(self) -> None:
        """Drops the sessions, which are made again when needed."""
        self._sessions.clear()

    def _session(self, block: int) -> BoundSession:
        return BoundSession(self._session_of(block), self._values, self._pools)

    def _named(self, seconds: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
        return {f"block_{block}": float(one) for block, one in zip(self._blocks, seconds, strict=True)}


_NO_ROWS = np.empty((0, 0), np.float32)

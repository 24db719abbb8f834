"""How long each block of a stage takes, whose blocks are one graph: it tells the time of all of them together.

Now and then the blocks run one by one, in sessions of their own on the same weights and pages, in the place of the one
graph: to the last digits the result is the same. What each took then divides the time of the steps that follow.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay_worker.execution.onnx.providers.provider import Provider

#: Of so many steps one is measured.
EVERY = 256
Arrays = dict[str, NDArray[Any]]


class BlockTimes:
    """Of the blocks of one stage. Used as its stage is, by one thread at a time."""

    def __init__(
        self,
        provider: Provider,
        blocks: Sequence[int],
        graph_of: Callable[[int], bytes],
        values: Mapping[str, Any],
        pools: Mapping[str, Any],
        *,
        always: bool,
    ) -> None:
        """`values` are inputs of the graphs on the device by name, and so are `pools`, which the graphs write in place
        (`NAME_out`). `always`: every step is measured. Nothing else is done before the first one that is."""
        self._provider, self._blocks, self._graph_of = provider, blocks, graph_of
        self._values, self._pools, self._always = values, pools, always
        self._sessions: list[_BlockSession] = []
        self._shares = np.full(len(blocks), 1 / len(blocks))
        self._steps = 1

    def measure_next(self) -> None:
        """Measure the next step, whatever its number."""
        self._steps = 0

    @property
    def due(self) -> bool:
        """Whether the next step is to be measured. One block alone has nothing to divide."""
        return self._always or (len(self._blocks) > 1 and self._steps % EVERY == 0)

    def divided(self, seconds: float) -> dict[str, float]:
        """A step of the one graph has taken so long: by block. An estimate, unless there is one block."""
        self._steps += 1
        return self._named(seconds * self._shares)

    def measured(self, inputs: Mapping[str, NDArray[Any]]) -> tuple[Arrays, dict[str, float]]:
        """A step block by block: outputs of the last one in memory of the host, and the seconds of each."""
        if not self._sessions:
            self._sessions = [self._session(block) for block in self._blocks]
        # Memory that stays for a step in 256 would be missing in all others.
        options = None if self._always else self._provider.shrinking()
        given, seconds = dict(inputs), list[float]()
        found: Arrays = {}
        for session in self._sessions:
            began = time.perf_counter()
            found = session.run(given, options)
            seconds.append(time.perf_counter() - began)
            given["hidden"] = found.get("hidden_out", given.get("hidden", _NO_ROWS))
        self._shares = np.asarray(seconds) / sum(seconds)
        self._steps += 1
        return found, self._named(seconds)

    def close(self) -> None:
        """Drop the sessions."""
        self._sessions.clear()

    def _session(self, block: int) -> "_BlockSession":
        return _BlockSession(self._provider, self._graph_of(block), self._values, self._pools)

    def _named(self, seconds: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
        return {f"block_{block}": float(one) for block, one in zip(self._blocks, seconds, strict=True)}


_NO_ROWS = np.empty((0, 0), np.float32)


class _BlockSession:
    """The graph of one block, with what it needs of a stage's values and pools bound to it."""

    def __init__(self, provider: Provider, graph: bytes, values: Mapping[str, Any], pools: Mapping[str, Any]) -> None:
        self._session = provider.session(graph)
        self._binding = self._session.io_binding()
        names = [one.name for one in self._session.get_inputs()]
        bound = {**values, **pools}
        for name in names:
            if name in bound:
                self._binding.bind_ortvalue_input(name, bound[name])
        self._given = [name for name in names if name not in bound]
        outputs = [one.name for one in self._session.get_outputs()]
        self._pools = {f"{name}_out": value for name, value in pools.items() if f"{name}_out" in outputs}
        self._outputs = [name for name in outputs if name not in self._pools]

    def run(self, inputs: Mapping[str, NDArray[Any]], options: Any) -> Arrays:
        """Its outputs, but for the pools. They are in memory of the host, so that the device has done it."""
        binding = self._binding
        for name in self._given:
            binding.bind_cpu_input(name, inputs[name])
        for name, value in self._pools.items():
            binding.bind_ortvalue_output(name, value)
        for name in self._outputs:
            binding.bind_output(name, "cpu")
        try:
            self._session.run_with_iobinding(binding, options)
            found = binding.get_outputs()[-len(self._outputs) :]
            return {name: value.numpy() for name, value in zip(self._outputs, found, strict=True)}
        finally:
            binding.clear_binding_outputs()

"""Chooses from logits on the device: only what sampling needs comes down to the host.

A device is probed first. One without a kernel for it, or with wrong results, sends whole rows.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay_worker.execution.onnx.graphs.selection import best_graph, largest_graph, rows_graph
from blockrelay_worker.execution.onnx.providers.provider import Provider
from blockrelay_worker.execution.selection import MAX_LARGEST, TOTAL_ERROR, Largest, LogitRow, Need, enough

#: Rows of logits in a probe.
_PROBE_ROWS = 3


class Selection:
    """Selects from rows of logits of one vocabulary on one device. Used by one thread."""

    def __init__(self, provider: Provider, vocabulary: int) -> None:
        """Probes the device. `vocabulary`: logits in a row. The logits must lie at `provider.place`, which must not be
        None."""
        self._provider, self._vocabulary = provider, vocabulary
        self._graphs = {"best": best_graph(vocabulary), "rows": rows_graph(vocabulary)}
        if vocabulary > MAX_LARGEST:
            self._graphs["largest"] = largest_graph(vocabulary, MAX_LARGEST)
        self._sessions: dict[str, Any] = {}
        self._down = 0
        self.refused: dict[str, str] = {}
        """The reason, for each way that does not work on this device."""
        self._probe()

    @property
    def able(self) -> tuple[str, ...]:
        """The ways that work on this device: `best` (arg-max), `largest` (top-k)."""
        return tuple(name for name in ("best", "largest") if name in self._graphs)

    def wants(self, wanted: Sequence[int], needs: Sequence[Need | None]) -> bool:
        """Returns whether a selection moves fewer bytes than whole rows. `needs` is empty, or has the need of each row
        in `wanted`; None: the whole row is needed. True if no row is wanted, else False if `refused` has `rows`."""
        return not len(wanted) or ("rows" in self._graphs and any(self._way(need) != "rows" for need in needs))

    def rows(self, logits: Any, needs: Sequence[Need | None]) -> tuple[list[LogitRow], NDArray[np.bool_], int]:
        """Returns three things for `logits`, float32 [len(needs), vocab] on the device: what each row's need asks for,
        whether each row is finite, and the number of bytes that came down to the host.

        A row comes whole if its need is None, or if a selection on this device does not decide it. For a greedy need
        only the id counts: its logit is given as 0, its total as 1. Call it only where `wants` returned True. Raises
        what ONNX Runtime raises."""
        self._down = 0
        selected: list[LogitRow] = [np.empty(0, np.float32)] * len(needs)
        finite = np.ones(len(needs), np.bool_)
        ways = [self._way(need) for need in needs]
        whole = [index for index, way in enumerate(ways) if way == "rows"]
        if which := [index for index, way in enumerate(ways) if way == "best"]:
            ids, sums = self._run("best", logits, which)
            finite[which] = np.isfinite(sums)
            for index, token in zip(which, ids[:, None], strict=True):
                selected[index] = Largest(token, np.zeros(1, np.float32))
        if which := [index for index, way in enumerate(ways) if way == "largest"]:
            inverse = _inverse([need for index in which if (need := needs[index]) is not None])
            values, ids, totals, sums = self._run("largest", logits, which, inverse)
            finite[which] = np.isfinite(sums)
            for index, value, token, total in zip(which, values, ids, totals.tolist(), strict=True):
                need = needs[index]
                assert need is not None
                if not finite[index] or enough(need, value, total):
                    order = np.argsort(token[: need.top_k or None])
                    selected[index] = Largest(token[order], value[order], total)
                else:
                    whole.append(index)
        if whole:
            for index, row in zip(whole, self._run("rows", logits, whole)[0], strict=True):
                selected[index], finite[index] = row, np.isfinite(row).all()
        return selected, finite, self._down

    def close(self) -> None:
        """Drops the sessions."""
        self._sessions.clear()

    def _way(self, need: Need | None) -> str:
        way = "rows" if need is None else "best" if need.greedy else "largest"
        return way if way in self._graphs else "rows"

    def _run(
        self, name: str, logits: Any, which: Sequence[int], inverse: NDArray[np.float32] | None = None
    ) -> list[NDArray[Any]]:
        """Runs the graph `name` on the rows `which` of `logits`. Returns its outputs, in the host's memory."""
        if name not in self._sessions:
            session = self._provider.session(self._graphs[name], quiet=True)
            self._sessions[name] = session, session.io_binding()
        session, binding = self._sessions[name]
        binding.bind_ortvalue_input("logits", logits)
        binding.bind_cpu_input("which", np.asarray(which, np.int64))
        if inverse is not None:
            binding.bind_cpu_input("inverse", inverse)
        for one in session.get_outputs():
            binding.bind_output(one.name, "cpu")
        try:
            session.run_with_iobinding(binding)
            outputs = [value.numpy() for value in binding.get_outputs()]
        finally:
            binding.clear_binding_inputs()
            binding.clear_binding_outputs()
        self._down += sum(array.nbytes for array in outputs)
        return outputs

    def _probe(self) -> None:
        """Compares the device with NumPy on rows with many equal logits, and refuses each way that is wrong or
        fails."""
        random = np.random.default_rng(1)
        logits = (random.normal(size=(_PROBE_ROWS, self._vocabulary)) * 4).round(1).astype(np.float32)
        order = np.argsort(-logits, axis=1, kind="stable")
        inverse = np.full((_PROBE_ROWS, 1), 0.5, np.float32)
        totals = np.exp((logits.astype(np.float64) - logits.max(axis=1, keepdims=True)) / 2).sum(axis=1)
        right: dict[str, list[NDArray[Any]]] = {
            "rows": [logits],
            "best": [order[:, 0]],
            "largest": [np.take_along_axis(logits, order[:, :MAX_LARGEST], 1), order[:, :MAX_LARGEST]],
        }
        which = np.arange(_PROBE_ROWS)[::-1]
        for name in list(self._graphs):
            try:
                session = self._provider.session(self._graphs[name], quiet=True)
                self._sessions[name] = session, session.io_binding()
                there = self._provider.upload(session, logits)
                outputs = self._run(name, there, which.tolist(), inverse if name == "largest" else None)
                if not all(np.array_equal(a, b[which]) for a, b in zip(outputs, right[name], strict=False)):
                    self._refuse(name, "its results differ from NumPy's")
                elif name == "largest" and not np.abs(outputs[2] / totals[which] - 1).max() <= TOTAL_ERROR / 8:
                    self._refuse(name, "its totals differ from NumPy's")
            except Exception as error:  # noqa: BLE001 ONNX Runtime's own exception types have no public common base
                self._refuse(name, str(error))
        self._down = 0

    def _refuse(self, name: str, why: str) -> None:
        self.refused[name] = why
        del self._graphs[name]
        self._sessions.pop(name, None)


def _inverse(needs: Sequence[Need]) -> NDArray[np.float32]:
    """Returns 1 / temperature, [n, 1]. Near 0 it is infinite and the row's total NaN, so that the whole row comes
    down."""
    with np.errstate(over="ignore", divide="ignore"):
        return (1 / np.array([[need.temperature] for need in needs])).astype(np.float32)

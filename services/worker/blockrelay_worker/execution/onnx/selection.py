"""Logits that stay on the device: what comes down is what tokens are chosen from.

A device is asked to choose before it may: one that has no kernel for it, or is wrong, gives whole rows.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay_worker.execution.onnx.graphs.selection import best_graph, largest_graph, rows_graph
from blockrelay_worker.execution.onnx.providers.provider import Provider
from blockrelay_worker.execution.selection import MOST, TOTAL_ERROR, Largest, LogitRow, Need, enough

#: Rows that a device is asked about.
_ASKED = 3


class Selection:
    """Of rows of logits of one vocabulary on one device. Used by one thread."""

    def __init__(self, provider: Provider, vocabulary: int) -> None:
        """Whatever it is asked about lies at `provider.place`, which it must have."""
        self._provider, self._vocabulary = provider, vocabulary
        self._graphs = {"best": best_graph(vocabulary), "rows": rows_graph(vocabulary)}
        if vocabulary > MOST:
            self._graphs["largest"] = largest_graph(vocabulary, MOST)
        self._sessions: dict[str, Any] = {}
        self._down = 0
        self.refused: dict[str, str] = {}
        """Of what it cannot do here, why not."""
        self._ask()

    @property
    def able(self) -> tuple[str, ...]:
        """What it does: `best` (arg-max), `largest` (top-k)."""
        return tuple(name for name in ("best", "largest") if name in self._graphs)

    def wants(self, wanted: Sequence[int], needs: Sequence[Need | None]) -> bool:
        """Whether fewer bytes come down by it than by whole rows, `needs` being empty or those of the rows `wanted`."""
        return not len(wanted) or ("rows" in self._graphs and any(self._way(need) != "rows" for need in needs))

    def rows(self, logits: Any, needs: Sequence[Need | None]) -> tuple[list[LogitRow], NDArray[np.bool_], int]:
        """Of the rows of `logits`, float32 [len(needs), vocab] on the device, what each needs; which of them are
        finite; and how many bytes came down."""
        self._down = 0
        found: list[LogitRow] = [np.empty(0, np.float32)] * len(needs)
        finite = np.ones(len(needs), np.bool_)
        ways = [self._way(need) for need in needs]
        whole = [index for index, way in enumerate(ways) if way == "rows"]
        if which := [index for index, way in enumerate(ways) if way == "best"]:
            ids, sums = self._run("best", logits, which)
            finite[which] = np.isfinite(sums)
            for index, token in zip(which, ids[:, None], strict=True):
                found[index] = Largest(token, np.zeros(1, np.float32))
        if which := [index for index, way in enumerate(ways) if way == "largest"]:
            inverse = _inverse([need for index in which if (need := needs[index]) is not None])
            values, ids, totals, sums = self._run("largest", logits, which, inverse)
            finite[which] = np.isfinite(sums)
            for index, value, token, total in zip(which, values, ids, totals.tolist(), strict=True):
                need = needs[index]
                assert need is not None
                if not finite[index] or enough(need, value, total):
                    order = np.argsort(token[: need.top_k or None])
                    found[index] = Largest(token[order], value[order], total)
                else:
                    whole.append(index)
        if whole:
            for index, row in zip(whole, self._run("rows", logits, whole)[0], strict=True):
                found[index], finite[index] = row, np.isfinite(row).all()
        return found, finite, self._down

    def close(self) -> None:
        """Drop the sessions."""
        self._sessions.clear()

    def _way(self, need: Need | None) -> str:
        way = "rows" if need is None else "best" if need.greedy else "largest"
        return way if way in self._graphs else "rows"

    def _run(
        self, name: str, logits: Any, which: Sequence[int], inverse: NDArray[np.float32] | None = None
    ) -> list[NDArray[Any]]:
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
            found = [value.numpy() for value in binding.get_outputs()]
        finally:
            binding.clear_binding_inputs()
            binding.clear_binding_outputs()
        self._down += sum(array.nbytes for array in found)
        return found

    def _ask(self) -> None:
        """Whether it chooses as NumPy does, of rows with many equal logits. What it does not, it shall not do."""
        random = np.random.default_rng(1)
        asked = (random.normal(size=(_ASKED, self._vocabulary)) * 4).round(1).astype(np.float32)
        order = np.argsort(-asked, axis=1, kind="stable")
        inverse = np.full((_ASKED, 1), 0.5, np.float32)
        totals = np.exp((asked.astype(np.float64) - asked.max(axis=1, keepdims=True)) / 2).sum(axis=1)
        right: dict[str, list[NDArray[Any]]] = {
            "rows": [asked],
            "best": [order[:, 0]],
            "largest": [np.take_along_axis(asked, order[:, :MOST], 1), order[:, :MOST]],
        }
        which = np.arange(_ASKED)[::-1]
        for name in list(self._graphs):
            try:
                session = self._provider.session(self._graphs[name], quiet=True)
                self._sessions[name] = session, session.io_binding()
                there = self._provider.upload(session, asked)
                found = self._run(name, there, which.tolist(), inverse if name == "largest" else None)
                if not all(np.array_equal(a, b[which]) for a, b in zip(found, right[name], strict=False)):
                    self._refuse(name, "it chooses others")
                elif name == "largest" and np.abs(found[2] / totals[which] - 1).max() > TOTAL_ERROR / 8:
                    self._refuse(name, "it adds up wrongly")
            except Exception as error:  # noqa: BLE001 ONNX Runtime's own exception types have no public common base
                self._refuse(name, str(error))
        self._down = 0

    def _refuse(self, name: str, why: str) -> None:
        self.refused[name] = why
        del self._graphs[name]
        self._sessions.pop(name, None)


def _inverse(needs: Sequence[Need]) -> NDArray[np.float32]:
    """[n, 1]. Of a temperature near 0 it is infinite, and a row's total no number: then it comes down whole."""
    with np.errstate(over="ignore", divide="ignore"):
        return (1 / np.array([[need.temperature] for need in needs])).astype(np.float32)

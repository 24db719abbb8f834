"""What a later stage makes of rows that came: matrices of rows, or tensors by name, never cut and dropped with their
run."""

from collections.abc import Mapping

import numpy as np
import pytest

from blockrelay.protocol.encoding.forward_segment import ForwardSegment
from blockrelay.protocol.encoding.named_tensors import NamedTensors
from blockrelay.protocol.messages import Forward
from blockrelay_worker.runs.run import Run
from blockrelay_worker.scheduling.later_stage import LaterStageBatcher, Refusal
from blockrelay_worker.scheduling.limits import BatchLimits
from blockrelay_worker.scheduling.step_cost import StepCost
from blockrelay_worker.scheduling.work import Work
from tests.support.worker.runs import new_run

LIMITS = BatchLimits(max_rows=8, max_sequences=8, ragged=True, drafts=False, step_share_s=0.05, chunk_s=5.0)


class Runs:
    """Has a run of every request, but for those in `refusals`."""

    def __init__(self) -> None:
        self.refusals: dict[str, Refusal] = {}

    def of(self, segment: ForwardSegment, message: Forward) -> Run | Refusal:
        return self.refusals.get(segment.request_id) or new_run(segment.request_id, [7], first=False)


def message(rows: Mapping[str, int], *, named: bool, first: int = 0) -> Forward:
    """Rows of each request from position `first` on. Tensors come in parts of one row each."""
    segments = tuple(
        ForwardSegment(request_id=q, run_id="r", sequence=0, position=first, token_ids=(7,) * n, ends_known=n == 1)
        for q, n in rows.items()
    )
    matrix = np.arange(sum(rows.values()), dtype=np.float32)[:, None]
    if not named:
        return Forward(sender="w", segments=segments, rows=matrix)
    parts = iter([NamedTensors(rows=1, arrays={"x": row[None, None]}) for row in matrix])
    return Forward(sender="w", segments=segments, tensors=[[next(parts) for _ in range(n)] for n in rows.values()])


def values(work: Work) -> list[float]:
    if work.hidden is not None:
        assert not work.tensors
        return work.hidden.ravel().tolist()
    return [float(part.arrays["x"].item()) for part in work.tensors]


def take(batcher: LaterStageBatcher) -> dict[str, list[float]]:
    work, _ = batcher.take(StepCost())
    return {item.run.request_id: values(item) for item in work}


@pytest.mark.parametrize("named", [False, True])
class TestEitherWay:
    def test_each_segment_has_its_own_and_is_not_cut(self, named: bool) -> None:
        batcher = LaterStageBatcher(LIMITS, Runs().of)
        batcher.add(message({"a": 2, "b": 9, "c": 1}, named=named))
        batcher.add(message({"a": 1}, named=named, first=2))
        assert take(batcher) == {"c": [11.0], "a": [0.0, 1.0]}, "b has no room beside them"
        assert take(batcher) == {"a": [0.0]}
        assert take(batcher) == {"b": [float(i) for i in range(2, 11)]}, "alone over the bound"
        assert not take(batcher)

    def test_what_is_refused_goes_and_what_is_loading_waits_in_its_place(self, named: bool) -> None:
        runs = Runs()
        batcher = LaterStageBatcher(LIMITS, runs.of)
        runs.refusals = {"gone": "drop", "missing": "rerun", "loading": "later"}
        batcher.add(message({"gone": 1, "missing": 1, "loading": 1, "here": 1}, named=named))
        work, refused = batcher.take(StepCost())
        assert [item.run.request_id for item in work] == ["here"] and [s.request_id for s in refused] == ["missing"]
        assert not batcher.take(StepCost())[0]
        runs.refusals = {}
        assert take(batcher) == {"loading": [2.0]}

    def test_what_has_to_wait_keeps_nothing_else_from_being_computed(self, named: bool) -> None:
        runs = Runs()
        batcher = LaterStageBatcher(LIMITS, runs.of)
        runs.refusals = {"waits": "later"}
        batcher.add(message({"waits": 8, "here": 1}, named=named))
        work, _ = batcher.take(StepCost())
        assert [item.run.request_id for item in work] == ["here"], "though the first one fills a batch"
        assert not batcher.take(StepCost())[0]
        runs.refusals = {}
        assert list(take(batcher)) == ["waits"]

    def test_nothing_is_kept_when_all_runs_are_forgotten(self, named: bool) -> None:
        batcher = LaterStageBatcher(LIMITS, Runs().of)
        batcher.add(message({"a": 2}, named=named))
        batcher.clear()
        assert take(batcher) == {}

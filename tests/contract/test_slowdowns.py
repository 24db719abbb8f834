"""A request that limits how much slower a CPU may be than the GPU that failed: RERUN and DEAD decide, once."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from blockrelay.protocol.block_times import BlockTimes
from blockrelay.protocol.encoding.fallback_policy import limited_to
from blockrelay.protocol.messages import Claimed
from blockrelay.protocol.transitions import calls
from tests.support.cell import MODEL, Cell, body

SPLIT = "1-2,3-4,5-6"


@pytest.fixture
def cell(cell: Cell) -> Cell:
    """GPUs have the first stage and the last, in two processes; CPUs have all three."""
    cell.scripts.run(calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class="gpu", plan="{}"))
    for name, stage in (("h:1:g0", 0), ("h:2:g2", 2)):
        cell.worker(name, split=SPLIT, stage=stage, device="gpu", numerics="g", varies=True)
    for name, stage in (("c0", 0), ("c1", 1), ("c2", 2)):
        cell.worker(name, split=SPLIT, stage=stage, numerics="c")
    return cell


def begin(cell: Cell, limit: float = 2.0, policy: str = "") -> Claimed:
    run = cell.begin("h:1:g0", [7], content=replace(body(), fallback=policy or limited_to(limit)))
    assert run.route == ("h:1:g0", "c1", "h:2:g2")
    return run


def predict(cell: Cell, slowdowns: Mapping[str, float]) -> None:
    cell.scripts.run(calls.publish_slowdowns(MODEL, slowdowns))


def measure(cell: Cell, worker: str, first: int, *seconds: float) -> None:
    """Has a worker publish what its blocks took."""
    times = BlockTimes(first=first, seconds=seconds, rows=1.0, context=9.0, free_bytes=0)
    cell.scripts.run(calls.heartbeat(worker, block_times=times.to_json()))


class TestALimit:
    @pytest.mark.parametrize("limit", [2.0, 2.5, 1e9])
    def test_that_the_prediction_keeps_lets_a_cpu_take_over(self, cell: Cell, limit: float) -> None:
        predict(cell, {"5-6": 2.0, "1-2": 9.0})
        run = begin(cell, limit)
        assert cell.rerun(run, "gpu_error", block="block_6", stage=2)
        (again,) = cell.claim("h:1:g0")
        assert again.route == ("h:1:g0", "c1", "c2")
        cell.commit(again, 1, [8], end="stop")
        (event,) = cell.end().fallbacks
        assert (event.block_id, event.predicted_slowdown, event.success) == ("block_6", 2.0, True)
        assert event.seen_slowdown is None and "seen_slowdown" not in event.to_json(), "none has measured itself"

    @pytest.mark.parametrize("limit", [1.999, 0.5, 1e-5])
    def test_that_the_prediction_exceeds_ends_the_request(self, cell: Cell, limit: float) -> None:
        predict(cell, {"5-6": 2.0})
        run = begin(cell, limit)
        answer = cell.scripts.run(calls.rerun("req-1", run.run_id, "gpu_error", block="block_6", stage=2))
        assert answer.ended and answer.fallbacks == ()
        end = cell.end()
        assert (end.reason, end.meta["code"], end.meta["failed_block"]) == ("error", "fallback_too_slow", "block_6")
        for told in ("block_6", f"max_slowdown of {limit:g}", "predicted to take 2 times as long", "blocks 5-6"):
            assert told in end.meta["error"], end.meta["error"]
        assert end.fallbacks == () and end.executed == (4, 2), "what was executed is told all the same"
        assert cell.timeline()[-2]["event"] == "fallback_denied"
        assert cell.claim("h:1:g0") == [] and not cell.outstanding()
        assert all(cell.reserved(worker) == 0 for worker in cell.workers)

    @pytest.mark.parametrize("known", [{}, {"1-2": 1.0}, {"5-5": 1.0}])
    def test_ends_the_request_where_nothing_is_predicted(self, cell: Cell, known: dict[str, float]) -> None:
        if known:
            predict(cell, known)
        cell.rerun(begin(cell, 1e9), "gpu_error", block="block_5", stage=2)
        end = cell.end()
        assert end.meta["code"] == "fallback_too_slow" and "is not known for blocks 5-6" in end.meta["error"]
        assert "block_5" in end.meta["error"] and "no CPU worker has them" in end.meta["error"]

    def test_holds_for_each_stage_that_falls_with_the_device(self, cell: Cell) -> None:
        cell.worker("h:1:g3", split=SPLIT, stage=2, device="gpu", numerics="g", varies=True)
        cell.scripts.run(calls.dead("h:2:g2", silent_s=0, reason="drain"))
        predict(cell, {"1-2": 1.5, "5-6": 2.5})
        cell.accept(content=replace(body(), fallback=limited_to(2)))
        (run,) = cell.claim("h:1:g0")
        cell.rerun(run, "gpu_error", block="block_1", stage=0, lost=True)
        end = cell.end()
        assert end.meta["failed_block"] == "block_5" and "2.5 times" in end.meta["error"]

    @pytest.mark.parametrize(("limit", "ended"), [(2.0, True), (3.0, False)])
    def test_holds_when_the_worker_dies(self, cell: Cell, limit: float, ended: bool) -> None:
        predict(cell, {"5-6": 2.5})
        begin(cell, limit)
        assert cell.scripts.run(calls.dead("h:2:g2", silent_s=0)) == (True, 1)
        assert (cell.claim("h:1:g0") == []) == ended
        assert (cell.record()["state"] == "done") == ended

    def test_is_asked_once_for_each_failure(self, cell: Cell) -> None:
        """What is predicted later changes nothing for a request that a CPU has taken over."""
        predict(cell, {"5-6": 2.0})
        cell.rerun(begin(cell), "gpu_error", block="block_5", stage=2)
        predict(cell, {"5-6": 99.0, "1-2": 99.0})
        (again,) = cell.claim("h:1:g0")
        cell.rerun(again, "drain")
        (last,) = cell.claim("h:1:g0")
        assert last.route == ("h:1:g0", "c1", "c2")
        cell.rerun(last, "gpu_error", block="block_1", stage=0)
        assert cell.end().meta["failed_block"] == "block_1"
        assert [event.block_id for event in cell.end().fallbacks] == ["block_5"]

    @pytest.mark.parametrize("reason", ["drain", "stalled", "missing_pages"])
    def test_is_not_asked_where_no_gpu_failed(self, cell: Cell, reason: str) -> None:
        run = begin(cell, 1e-9)
        assert cell.rerun(run, reason)
        (again,) = cell.claim("h:1:g0")
        assert again.request_id == "req-1"

    def test_is_not_asked_when_a_gpu_drains(self, cell: Cell) -> None:
        begin(cell, 1e-9)
        cell.scripts.run(calls.dead("h:2:g2", silent_s=0, reason="drain"))
        (again,) = cell.claim("h:1:g0")
        assert again.route == ("h:1:g0", "c1", "c2"), "a drain is no failure"


class TestEvents:
    @pytest.mark.parametrize("policy", ["allow", "recompute", limited_to(5)])
    def test_tell_what_was_predicted_and_what_was_seen(self, cell: Cell, policy: str) -> None:
        predict(cell, {"5-6": 2.34567})
        measure(cell, "h:2:g2", 5, 1e-3, 3e-3)
        cell.rerun(begin(cell, policy=policy), "gpu_error", block="block_5", stage=2)
        (again,) = cell.claim("h:1:g0")
        measure(cell, "c2", 5, 5e-3, 5e-3)
        cell.commit(again, 1, [8], end="stop")
        (event,) = cell.end().fallbacks
        assert (event.predicted_slowdown, event.seen_slowdown) == (2.346, 2.5)
        told = event.to_json()
        assert (told["predicted_slowdown"], told["seen_slowdown"]) == (2.346, 2.5)

    def test_leave_out_what_is_not_known(self, cell: Cell) -> None:
        measure(cell, "h:2:g2", 5, 1e-3, 3e-3)
        cell.rerun(begin(cell, policy="allow"), "gpu_error", block="block_5", stage=2)
        (again,) = cell.claim("h:1:g0")
        measure(cell, "c2", 5, 5e-3)  # of the blocks that it had before
        cell.commit(again, 1, [8], end="stop")
        (event,) = cell.end().fallbacks
        assert (event.predicted_slowdown, event.seen_slowdown) == (None, None)

    def test_tell_nothing_seen_where_the_cpu_did_nothing(self, cell: Cell) -> None:
        measure(cell, "h:2:g2", 5, 1e-3, 3e-3)
        measure(cell, "c2", 5, 5e-3, 5e-3)
        cell.rerun(begin(cell, policy="allow"), "gpu_error", block="block_5", stage=2)
        cell.claim("h:1:g0")
        cell.scripts.run(calls.finish("req-1", "cancelled"))
        (event,) = cell.end().fallbacks
        assert not event.success and event.seen_slowdown is None


def test_slowdowns_change_no_plan(cell: Cell) -> None:
    before = cell.client.hgetall(cell.keys.plan(MODEL))
    assert cell.scripts.run(calls.publish_slowdowns(MODEL, {"1-2": 3.0})) == 1
    after = cell.client.hgetall(cell.keys.plan(MODEL))
    assert after == {**before, b"slowdowns": b'{"1-2":3.0}'}  # pyright: ignore[reportGeneralTypeIssues]

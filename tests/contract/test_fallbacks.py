"""Which stages fall back with a device, what their events say, and where blocks were executed."""

from typing import Any

import pytest

from blockrelay.protocol.messages import EndEntry
from blockrelay.protocol.transitions import calls
from tests.support.cell import MODEL, Cell, body

SPLIT = "1-2,3-4,5-9,10-10"
#: One process has the stages 0 and 2, another one stage 1; the last is a CPU's. By their ids, as workers are called.
ONE, BESIDE, TWO, LAST = "h:7:aa", "h:7:bb", "h:8:aa", "h:9:aa"


@pytest.fixture
def cell(cell: Cell) -> Cell:
    """With a route of three GPU stages on two devices, and CPUs that could take each."""
    cell.scripts.run(calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class="gpu", plan="{}"))
    for name, stage in ((ONE, 0), (TWO, 1), (BESIDE, 2)):
        cell.worker(name, split=SPLIT, stage=stage, device="gpu", numerics="g", varies=True)
    for name, stage in (("c0", 0), ("c1", 1), ("c2", 2), (LAST, 3)):
        cell.worker(name, split=SPLIT, stage=stage, numerics="c")
    cell.accept(content=body(max_tokens=20))
    return cell


def end_of(cell: Cell, request_id: str = "req-1") -> EndEntry:
    end = cell.end(request_id)
    return end


def told(end: EndEntry) -> list[tuple[str, str, str]]:
    """Of each event its block, and the first and last of its stage."""
    return [(event.block_id, event.blocks[0], event.blocks[-1]) for event in end.fallbacks]


LOST: dict[str, Any] = {"detail": "gpu_device_lost", "code": "INTERNAL", "lost": True}


class TestALostDevice:
    @pytest.mark.parametrize(("stage", "block"), [(0, "block_1"), (2, "block_5"), (0, "block_5"), (2, "block_1")])
    def test_takes_all_its_stages_and_no_other(self, cell: Cell, stage: int, block: str) -> None:
        """Whichever of its stages says so, and whichever of its blocks the device names."""
        (run,) = cell.claim(ONE)
        assert run.route == (ONE, TWO, BESIDE, LAST)
        cell.commit(run, 0, [7])
        answer = cell.scripts.run(calls.rerun("req-1", run.run_id, "gpu_error", block=block, stage=stage, **LOST))
        assert answer.ended and [event.block_id for event in answer.fallbacks] == ["block_1", "block_5"]
        other = 2 - stage
        assert not cell.rerun(run, "gpu_error", block=block, stage=other, **LOST), "its other stage says so too late"
        (again,) = cell.claim("c0")
        assert again.route == ("c0", TWO, "c2", LAST), "what is healthy stays on its device"
        cell.commit(again, 1, [8], end="stop")
        end = end_of(cell)
        assert told(end) == [("block_1", "block_1", "block_2"), ("block_5", "block_5", "block_9")]
        assert {(e.reason, e.error_code, e.success, e.position) for e in end.fallbacks} == {
            ("gpu_device_lost", "INTERNAL", True, 1)
        }

    def test_that_names_a_block_is_told_by_that_block(self, cell: Cell) -> None:
        (run,) = cell.claim(ONE)
        cell.rerun(run, "gpu_error", block="block_7", stage=0, **LOST)
        cell.scripts.run(calls.finish("req-1", "cancelled"))
        assert told(end_of(cell)) == [("block_1", "block_1", "block_2"), ("block_7", "block_5", "block_9")]
        assert not any(event.success for event in end_of(cell).fallbacks), "no CPU has computed any of it"

    def test_is_in_the_timeline_with_its_stages(self, cell: Cell) -> None:
        (run,) = cell.claim(ONE)
        cell.rerun(run, "gpu_error", block="block_1", stage=0, **LOST)
        events = [event for event in cell.timeline() if event["event"] in ("rerun", "fallback")]
        why = {"reason": "gpu_device_lost", "error_code": "INTERNAL"}
        assert [{k: v for k, v in event.items() if k != "at_ms"} for event in events] == [
            {"event": "rerun", "reason": "gpu_error", "tokens": 0},
            {"event": "fallback", "block_id": "block_1", "blocks": ["block_1", "block_2"], **why},
            {"event": "fallback", "block_id": "block_5", "blocks": [f"block_{n}" for n in range(5, 10)], **why},
        ]


class TestADeadWorker:
    @pytest.mark.parametrize("first", [ONE, BESIDE])
    def test_takes_all_stages_of_its_process(self, cell: Cell, first: str) -> None:
        cell.claim(ONE)
        cell.scripts.run(calls.dead(first, silent_s=0))
        (again,) = cell.claim("c0")
        assert again.route == ("c0", TWO, "c2", LAST), "its other worker is not declared dead yet"
        cell.commit(again, 0, [7], end="stop")
        assert {(e.block_id, e.reason, e.error_code) for e in end_of(cell).fallbacks} == {
            ("block_1", "worker_death", "INTERNAL"),
            ("block_5", "worker_death", "INTERNAL"),
        }

    @pytest.mark.parametrize(("silent_ms", "stage_2"), [(0, BESIDE), (1500, "c2")])
    def test_that_fell_silent_takes_those_that_are_silent_too(self, cell: Cell, silent_ms: int, stage_2: str) -> None:
        cell.claim(ONE)
        now = cell.now_ms()
        cell.client.zadd(cell.keys.workers, {ONE: now - 3500, BESIDE: now - silent_ms})
        assert cell.scripts.run(calls.dead(ONE, silent_s=3)) == (True, 1)
        (again,) = cell.claim("c0")
        assert again.route == ("c0", TWO, stage_2, LAST)

    def test_drains_without_an_event(self, cell: Cell) -> None:
        cell.claim(ONE)
        cell.scripts.run(calls.dead(ONE, silent_s=0, reason="drain"))
        cell.scripts.run(calls.finish("req-1", "cancelled"))
        assert end_of(cell).fallbacks == ()

    def test_that_never_had_a_stage_leaves(self, cell: Cell) -> None:
        cell.client.hset(cell.keys.worker("loading"), mapping={"device": "gpu", "model": MODEL})
        assert cell.scripts.run(calls.dead("loading", silent_s=0)) == (True, 0)


class TestExecutedBlocks:
    def test_a_failure_of_one_stage_takes_that_stage_alone(self, cell: Cell) -> None:
        """Also where its device has another one. Each step counts all blocks where its run had them."""
        (run,) = cell.claim(ONE)
        cell.commit(run, 0, [7])
        cell.commit(run, 1, [8, 9])  # a guess was right: one step
        assert cell.commit(run, 1, [8, 9]).verdict == "OK", "sent twice, it is one step"
        cell.rerun(run, "gpu_error", block="block_6", stage=2, detail="gpu_memory_error", code="OOM")
        (again,) = cell.claim(ONE)
        assert again.route == (ONE, TWO, "c2", LAST)
        cell.commit(again, 3, [10])
        cell.commit(again, 4, [11], end="length")
        end = end_of(cell)
        assert told(end) == [("block_6", "block_5", "block_9")]
        assert end.executed == (2 * 9 + 2 * 4, 2 * 1 + 2 * 6), "four steps of ten blocks"

    def test_a_tensor_step_counts_each_block_once(self, cell: Cell) -> None:
        (run,) = cell.claim(ONE)
        cell.commit(run, 0, [], end="tensor")
        assert end_of(cell).executed == (9, 1)

    @pytest.mark.parametrize("reason", ["death", "drain", "stalled"])
    def test_what_any_run_has_committed_is_counted_however_it_ended(self, cell: Cell, reason: str) -> None:
        (run,) = cell.claim(ONE)
        cell.commit(run, 0, [7])
        cell.rerun(run, reason)
        assert cell.commit(run, 1, [8]).verdict == "LOST"
        cell.scripts.run(calls.finish("req-1", "cancelled"))
        assert end_of(cell).executed == (9, 1)

    def test_nothing_is_said_where_nothing_was_committed(self, cell: Cell) -> None:
        (run,) = cell.claim(ONE)
        cell.rerun(run, "drain")
        cell.scripts.run(calls.finish("req-1", "cancelled"))
        assert end_of(cell).executed is None

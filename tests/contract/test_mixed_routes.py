"""Routes of nondeterministic GPUs and CPUs: which workers may be in one, what a failure moves, what its events say."""

from dataclasses import replace

import pytest

from blockrelay.protocol.messages import Claimed, RequestBody
from blockrelay.protocol.transitions import calls
from tests.support.cell import MODEL, Cell, body

SPLIT = "1-2,3-4,5-6"


@pytest.fixture
def cell(cell: Cell) -> Cell:
    """In which some stage has a GPU."""
    cell.scripts.run(calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class="gpu", plan="{}"))
    return cell


def gpu(cell: Cell, name: str, stage: int, *, numerics: str = "g") -> str:
    return cell.worker(name, split=SPLIT, stage=stage, device="gpu", numerics=numerics, varies=True)


def cpu(cell: Cell, name: str, stage: int, *, numerics: str = "c") -> str:
    return cell.worker(name, split=SPLIT, stage=stage, numerics=numerics)


@pytest.fixture
def sandwich(cell: Cell) -> Cell:
    """GPU, CPU, GPU, and a CPU that could take the place of each GPU."""
    gpu(cell, "g0", 0)
    cpu(cell, "c1", 1)
    gpu(cell, "g2", 2)
    cpu(cell, "c0", 0)
    cpu(cell, "c2", 2)
    return cell


def exact() -> RequestBody:
    return replace(body(), exact=True)


class TestARoute:
    def test_has_gpus_where_they_are_and_cpus_between_them(self, sandwich: Cell) -> None:
        sandwich.accept()
        assert sandwich.claim("c0") == [], "a GPU of the first stage lives"
        (run,) = sandwich.claim("g0")
        assert run.route == ("g0", "c1", "g2") and run.private
        assert sandwich.record()["numerics"] == "g/c"

    def test_may_begin_with_a_cpu(self, cell: Cell) -> None:
        cpu(cell, "c0", 0)
        gpu(cell, "g1", 1)
        cpu(cell, "c2", 2)
        run = cell.begin("c0")
        assert run.route == ("c0", "g1", "c2") and run.private and cell.record()["numerics"] == "c/g"

    def test_names_gpus_of_two_kinds(self, cell: Cell) -> None:
        gpu(cell, "g0", 0)
        gpu(cell, "h1", 1, numerics="h")
        gpu(cell, "g2", 2)
        run = cell.begin("g0")
        assert run.private and cell.record()["numerics"] == "g/h"

    def test_of_cpus_alone_is_called_as_before(self, cell: Cell) -> None:
        cpu(cell, "c0", 0)
        cpu(cell, "c1", 1)
        cpu(cell, "c2", 2)
        run = cell.begin("c0")
        assert not run.private and cell.record()["numerics"] == "c"

    def test_never_has_cpus_of_two_numerics_ids(self, cell: Cell) -> None:
        gpu(cell, "g0", 0)
        cpu(cell, "c1", 1)
        cpu(cell, "d2", 2, numerics="d")
        cell.accept()
        assert cell.claim("g0") == []
        cpu(cell, "d1", 1, numerics="d")
        (run,) = cell.claim("g0")
        assert run.route == ("g0", "d1", "d2")

    def test_waits_for_a_gpu_that_has_no_room_rather_than_take_its_stand_in(self, sandwich: Cell) -> None:
        sandwich.client.hset(sandwich.keys.worker("g2"), "pages_reserved", 100)
        sandwich.accept()
        assert sandwich.claim("g0") == []


class TestAFailure:
    def test_moves_its_stage_alone(self, sandwich: Cell) -> None:
        run = sandwich.begin("g0", [7, 8])
        assert sandwich.rerun(run, "gpu_error", block="block_5", stage=2)
        (again,) = sandwich.claim("g0")
        assert again.route == ("g0", "c1", "c2") and again.tokens == (7, 8)
        assert sandwich.record()["numerics"] == "g/c", "the same ids as before"

    def test_of_the_first_stage_gives_it_to_a_cpu_and_leaves_the_other_gpu_in_the_route(self, sandwich: Cell) -> None:
        run = sandwich.begin("g0", [7, 8])
        assert sandwich.rerun(run, "gpu_error", block="block_2", stage=0)
        assert sandwich.claim("g0") == []
        (again,) = sandwich.claim("c0")
        assert again.route == ("c0", "c1", "g2")
        assert sandwich.record()["numerics"] == "g/c+c/g@2"
        (changed,) = [event for event in sandwich.timeline() if event["event"] == "numerics_changed"]
        assert (changed["numerics_id"], changed["tokens"]) == ("c/g", 2)

    def test_is_the_death_of_a_gpu_worker_too(self, sandwich: Cell) -> None:
        sandwich.begin("g0")
        sandwich.scripts.run(calls.dead("g2", silent_s=0))
        gpu(sandwich, "another", 2)
        (again,) = sandwich.claim("g0")
        assert again.route == ("g0", "c1", "c2")
        sandwich.commit(again, 0, [7], end="stop")
        end = sandwich.end()
        assert [(event.block_id, event.success) for event in end.fallbacks] == [("block_5", True)]

    def test_is_remembered_by_its_block_under_another_split(self, sandwich: Cell) -> None:
        run = sandwich.begin("g0")
        sandwich.rerun(run, "gpu_error", block="block_4", stage=1)
        for stage, device in enumerate(("gpu", "gpu", "gpu")):
            sandwich.worker(f"n{stage}", split="1-1,2-4,5-6", stage=stage, device=device, numerics="g", varies=True)
        sandwich.worker("m1", split="1-1,2-4,5-6", stage=1, numerics="c")
        (again,) = sandwich.claim("n0")
        assert again.route == ("n0", "m1", "n2")

    def test_comes_back_to_a_gpu_where_no_cpu_has_the_stage(self, cell: Cell) -> None:
        gpu(cell, "g0", 0)
        cpu(cell, "c1", 1)
        gpu(cell, "g2", 2)
        run = cell.begin("g0")
        cell.rerun(run, "gpu_error", block="block_5", stage=2)
        (again,) = cell.claim("g0")
        assert again.route == ("g0", "c1", "g2")
        cell.rerun(again, "drain", block="block_1", stage=0)
        assert [job.route for job in cell.claim("g0")] == [("g0", "c1", "g2")], "nor for the first one"


class TestALogThatAGpuHasComputed:
    def test_goes_on_anywhere_at_once(self, sandwich: Cell) -> None:
        run = sandwich.begin("g0", [7])
        sandwich.rerun(run, "stalled")
        sandwich.scripts.run(calls.dead("g0", silent_s=0, reason="drain"))
        sandwich.scripts.run(calls.dead("g2", silent_s=0, reason="drain"))
        (again,) = sandwich.claim("c0")
        assert again.route == ("c0", "c1", "c2") and again.private, "its pages stay its own"
        assert sandwich.record()["numerics"] == "g/c+c@1"

    def test_is_that_of_cpus_once_they_have_gone_on_with_it(self, sandwich: Cell) -> None:
        run = sandwich.begin("g0", [7])
        sandwich.rerun(run, "gpu_error", block="block_1", stage=0)
        sandwich.scripts.run(calls.dead("g2", silent_s=0, reason="drain"))
        (run,) = sandwich.claim("c0")
        assert run.route == ("c0", "c1", "c2") and run.private
        sandwich.commit(run, 1, [8])
        gpu(sandwich, "g2", 2)
        sandwich.rerun(run, "stalled")
        assert sandwich.claim("g0") == []
        (again,) = sandwich.claim("c0")
        assert again.route == ("c0", "c1", "c2"), "nobody who varies goes on while CPUs of its id live"

    def test_waits_for_those_cpus_though_gpus_take_requests_of_its_class(self, sandwich: Cell) -> None:
        """Begun while no GPU was there, it is for CPUs of that id, and no GPU of the first stage may have it."""
        for name in ("g0", "g2"):
            sandwich.scripts.run(calls.dead(name, silent_s=0, reason="drain"))
        run = sandwich.begin("c0", [7])
        gpu(sandwich, "g0", 0)
        sandwich.rerun(run, "drain")
        assert sandwich.claim("g0") == [] and sandwich.pinned("c", "gpu") == ["req-1"]
        (again,) = sandwich.claim("c0")
        assert again.route == ("c0", "c1", "c2") and again.tokens == (7,)


class TestExact:
    def test_has_no_gpu_that_varies(self, sandwich: Cell) -> None:
        sandwich.accept(content=exact())
        assert sandwich.claim("g0") == []
        (run,) = sandwich.claim("c0")
        assert run.route == ("c0", "c1", "c2") and not run.private

    def test_holds_nobody_up(self, sandwich: Cell) -> None:
        """Those behind it are for the GPU."""
        sandwich.accept("req-1", content=exact())
        sandwich.accept("req-2")
        assert [run.request_id for run in sandwich.claim("g0")] == ["req-2"]

    def test_is_refused_where_every_route_has_one(self, cell: Cell) -> None:
        gpu(cell, "g0", 0)
        cpu(cell, "c1", 1)
        cpu(cell, "c2", 2)
        assert cell.accept(content=exact()).status == "NOT_EXACT"
        assert cell.accept("req-2").status == "OK"

    def test_waits_where_a_cpu_left_just_now(self, cell: Cell) -> None:
        """As after a Redis that was full: whoever comes back first may be the GPU."""
        gpu(cell, "g0", 0)
        for stage in range(3):
            cpu(cell, f"c{stage}", stage)
        cell.scripts.run(calls.dead("c0", silent_s=0))
        assert cell.accept("req-1", content=exact()).status == "OK"
        assert cell.claim("g0") == []
        assert cell.client.pttl(cell.keys.key("exact-left", MODEL)) > 50_000
        cell.client.delete(cell.keys.key("exact-left", MODEL))
        assert cell.accept("req-2", content=exact()).status == "NOT_EXACT"
        cpu(cell, "c3", 0)
        assert [run.route for run in cell.claim("c3")] == [("c3", "c1", "c2")]

    def test_is_for_cpus_when_gpus_come_later(self, cell: Cell) -> None:
        cell.accept(content=exact())
        for stage in range(3):
            cpu(cell, f"c{stage}", stage)
        gpu(cell, "g0", 0)
        assert cell.claim("g0") == []
        assert [run.route for run in cell.claim("c0")] == [("c0", "c1", "c2")]

    def test_waits_where_nobody_is(self, cell: Cell) -> None:
        assert cell.accept(content=exact()).status == "OK"


class TestPages:
    """Of a request that a device which varies had a part in: later runs of it take what all stages still have."""

    def test_are_found_up_to_where_every_stage_has_them(self, sandwich: Cell) -> None:
        run = sandwich.begin("g0", content=body([1] * 100))
        assert run.reusable is None
        sandwich.rerun(run, "gpu_error", block="block_5", stage=2)
        (run,) = sandwich.claim("g0")
        assert run.reusable is None, "nobody has said yet what it lacks"
        sandwich.rerun(run, "missing_pages", found=48)
        (again,) = sandwich.claim("g0")
        assert again.reusable == 48
        assert not sandwich.rerun(run, "missing_pages", found=16), "a run that is over"
        sandwich.rerun(again, "drain")
        (run,) = sandwich.claim("g0")
        assert run.reusable == 48
        sandwich.rerun(run, "missing_pages", found=0)
        assert [run.reusable for run in sandwich.claim("g0")] == [0]

    def test_are_not_taken_by_cpus_that_begin_anew(self, sandwich: Cell) -> None:
        """Else their tokens would be no CPU's, under a numerics id that says so."""
        sandwich.begin("g0")
        sandwich.scripts.run(calls.dead("g0", silent_s=0))
        sandwich.scripts.run(calls.dead("g2", silent_s=0))
        (run,) = sandwich.claim("c0")
        assert run.route == ("c0", "c1", "c2") and not run.private and sandwich.record()["numerics"] == "c"
        sandwich.commit(run, 0, [7])
        sandwich.rerun(run, "drain")
        assert [run.private for run in sandwich.claim("c0")] == [False]

    def test_stay_private_when_cpus_go_on(self, sandwich: Cell) -> None:
        run = sandwich.begin("g0", [7])
        sandwich.scripts.run(calls.dead("g0", silent_s=0))
        sandwich.scripts.run(calls.dead("g2", silent_s=0))
        (run,) = sandwich.claim("c0")
        assert run.route == ("c0", "c1", "c2") and run.private
        # Which of them a CPU finds decides what it computes, and after a failover others may be there.
        sandwich.commit(run, 1, [8])
        log = sandwich.client.xrange(sandwich.keys.log(run.request_id))
        assert [b"varies" in fields for _, fields in log] == [True, True]  # pyright: ignore

    def test_are_not_taken_where_the_client_says_so(self, sandwich: Cell) -> None:
        run = sandwich.begin("g0", content=replace(body(), fallback="recompute"))
        sandwich.rerun(run, "drain")
        (run,) = sandwich.claim("g0")
        assert run.reusable is None, "no device has failed"
        sandwich.rerun(run, "gpu_error", block="block_5", stage=2)
        assert [run.reusable for run in sandwich.claim("g0")] == [0]

    def test_are_not_asked_for_beyond_where_a_device_had_no_room_until_there_is_a_token(self, sandwich: Cell) -> None:
        """Later failures are another story."""
        run = sandwich.begin("g0", [7, 8])
        sandwich.rerun(run, "gpu_error", block="block_5", stage=2, found=37)
        (run,) = sandwich.claim("g0")
        assert run.reusable == 37
        sandwich.commit(run, 2, [9], rows=0)
        sandwich.rerun(run, "gpu_error", block="block_2", stage=0)
        assert [run.reusable for run in sandwich.claim("c0")] == [None]

    def test_that_were_missing_are_told_with_the_fallback(self, sandwich: Cell) -> None:
        run = sandwich.begin("g0", [7, 8])
        sandwich.rerun(run, "gpu_error", block="block_5", stage=2)
        (run,) = sandwich.claim("g0")
        sandwich.commit(run, 2, [9], rows=5)
        sandwich.rerun(run, "gpu_error", block="block_2", stage=0)
        (run,) = sandwich.claim("c0")
        sandwich.commit(run, 3, [9], rows=11)
        sandwich.commit(run, 4, [9], end="stop")
        end = sandwich.end()
        assert [(event.position, event.rows_recomputed) for event in end.fallbacks] == [(2, 5), (3, 11)]


class TestDenied:
    """`fallback: deny`: no CPU takes the place of a GPU that failed."""

    @pytest.fixture
    def run(self, sandwich: Cell) -> Claimed:
        run = sandwich.begin("g0", [7], content=replace(body(), fallback="deny"))
        return run

    def test_goes_on_at_another_gpu(self, sandwich: Cell, run: Claimed) -> None:
        sandwich.rerun(run, "gpu_error", block="block_5", stage=2)
        (again,) = sandwich.claim("g0")
        assert again.route == ("g0", "c1", "g2") and "denied_block" not in sandwich.record()
        sandwich.commit(again, 1, [8], end="stop")
        end = sandwich.end()
        assert end.fallbacks == ()

    def test_waits_for_one(self, sandwich: Cell, run: Claimed) -> None:
        sandwich.rerun(run, "gpu_error", block="block_5", stage=2)
        sandwich.scripts.run(calls.dead("g2", silent_s=0, reason="drain"))
        sandwich.accept("req-2")
        assert [job.request_id for job in sandwich.claim("g0")] == ["req-2"], "and holds nobody up"
        assert sandwich.timeline()[-1]["event"] == "fallback_denied"
        gpu(sandwich, "g3", 2)
        (again,) = sandwich.claim("g0")
        assert again.route == ("g0", "c1", "g3")

    def test_waits_for_one_of_the_first_stage(self, sandwich: Cell, run: Claimed) -> None:
        sandwich.rerun(run, "gpu_error", block="block_1", stage=0)
        sandwich.scripts.run(calls.dead("g0", silent_s=0, reason="drain"))
        assert sandwich.claim("c0") == []
        gpu(sandwich, "g3", 0)
        assert [job.route for job in sandwich.claim("g3")] == [("g3", "c1", "g2")]

    def test_waits_for_all_gpus_that_it_had(self, sandwich: Cell, run: Claimed) -> None:
        """One device has two stages. Both are gone, and one of them comes back first."""
        sandwich.rerun(run, "gpu_error", block="block_1", stage=0)
        for name in ("g0", "g2"):
            sandwich.scripts.run(calls.dead(name, silent_s=0, reason="drain"))
        gpu(sandwich, "g3", 0)
        assert sandwich.claim("g3") == [], "a CPU would take the place of g2"
        gpu(sandwich, "g4", 2)
        sandwich.a_second_passes()
        assert [job.route for job in sandwich.claim("g3")] == [("g3", "c1", "g4")]

    def test_is_ended_for_want_of_a_gpu_only_while_it_waits(self, sandwich: Cell, run: Claimed) -> None:
        """A scheduler that has seen it wait acts a moment later."""
        sandwich.rerun(run, "gpu_error", block="block_5", stage=2)
        give_up = calls.finish("req-1", "error", meta={"code": "fallback_denied"}, denied=True)
        sandwich.claim("g0")
        assert sandwich.scripts.run(give_up) == "LOST"
        sandwich.scripts.run(calls.dead("g2", silent_s=0))
        assert sandwich.scripts.run(give_up) == "FINISHED"

    def test_waits_since_the_first_failure_that_no_gpu_has_answered(self, sandwich: Cell, run: Claimed) -> None:
        sandwich.rerun(run, "gpu_error", block="block_5", stage=2)
        since = int(sandwich.record()["denied_ms"])
        assert abs(since - sandwich.now_ms()) < 1000

    def test_a_drain_is_no_failure(self, sandwich: Cell, run: Claimed) -> None:
        sandwich.scripts.run(calls.dead("g2", silent_s=0, reason="drain"))
        (again,) = sandwich.claim("g0")
        assert again.route == ("g0", "c1", "c2")


def test_its_tokens_say_that_nobody_could_commit_them_again(sandwich: Cell) -> None:
    """Gateways wait for replicas then. Those of CPUs alone say nothing."""
    sandwich.accept("req-1")
    sandwich.accept("req-2", content=exact())
    (varying,), (alone,) = sandwich.claim("g0"), sandwich.claim("c0")
    for run in (varying, alone):
        sandwich.commit(run, 0, [7])
    logs = [sandwich.client.xrange(sandwich.keys.log(run.request_id)) for run in (varying, alone)]
    assert [b"varies" in fields for entries in logs for _, fields in entries] == [True, False]  # pyright: ignore
    for run in (varying, alone):
        sandwich.commit(run, 1, [8], end="stop")
    logs = [sandwich.client.xrange(sandwich.keys.log(run.request_id)) for run in (varying, alone)]
    assert [b"varies" in fields for entries in logs for _, fields in entries] == [True, False]  # pyright: ignore

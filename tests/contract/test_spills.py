"""A request that a GPU is to begin begins on a CPU where it ends sooner, by known figures alone."""

from dataclasses import replace

import pytest

from blockrelay.protocol.block_times import BlockTimes
from blockrelay.protocol.encoding.fallback_policy import limited_to
from blockrelay.protocol.messages import Commit, RequestBody
from blockrelay.protocol.records.provenance import provenance
from blockrelay.protocol.transitions import calls
from tests.support.cell import MODEL, Cell, body

WHOLE, HALVES = "1-4", "1-2,3-4"


def measure(cell: Cell, worker: str, ms: float, *, first: int = 1, blocks: int = 4, rows: float = 1.0) -> None:
    """Has a worker publish that a step of `rows` takes `ms` milliseconds in all of its blocks together."""
    times = BlockTimes(first=first, seconds=(ms / blocks / 1e3,) * blocks, rows=rows, context=9.0, free_bytes=0)
    cell.scripts.run(calls.heartbeat(worker, block_times=times.to_json()))


def queue(cell: Cell, *names: str, content: RequestBody | None = None) -> None:
    for name in names:
        cell.accept(name, content=content or body())


def claimed(cell: Cell, worker: str) -> list[str]:
    return [run.request_id for run in cell.claim(worker)]


@pytest.fixture
def gpus_first(cell: Cell) -> Cell:
    cell.scripts.run(calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class="gpu", plan="{}"))
    return cell


class TestOfAWholeModel:
    @pytest.fixture
    def cell(self, gpus_first: Cell) -> Cell:
        """A GPU has two requests, as many as it takes, and its steps take 2 ms; those of the CPU take 3."""
        cell = gpus_first
        cell.worker("g", split=WHOLE, device="gpu", numerics="g", varies=True, slots=2)
        cell.worker("c", split=WHOLE, numerics="c")
        queue(cell, "run-1", "run-2")
        assert claimed(cell, "g") == ["run-1", "run-2"]
        measure(cell, "g", 2.0, rows=2.0)
        measure(cell, "c", 3.0)
        return cell

    def test_the_first_that_ends_sooner_there_goes_to_the_cpu(self, cell: Cell) -> None:
        queue(cell, "first")
        assert claimed(cell, "c") == [], "the GPU ends a request each step of two, so it begins soon"
        queue(cell, "second")
        (run,) = cell.claim("c")
        assert (run.request_id, run.route, run.route_class) == ("second", ("c",), "gpu")
        assert cell.queued(route_class="gpu") == ["first"]
        assert cell.record("second")["numerics"] == "c"
        cell.commit(run, 0, [7])
        record = {name.encode(): value.encode() for name, value in cell.record("second").items()}
        assert [stage.device for ran in provenance(record, 1) for stage in ran.stages] == ["cpu"], "its device is told"

    def test_as_many_go_as_end_sooner_beside_each_other(self, cell: Cell) -> None:
        """Each on the CPU makes the next one slower there: a step takes 3 ms, then 6, then 9."""
        queue(cell, *(f"r{number}" for number in range(9)))
        assert claimed(cell, "c") == ["r1", "r5"]

    def test_a_gpu_takes_the_others_in_their_order(self, cell: Cell) -> None:
        queue(cell, "first", "second", "third")
        assert claimed(cell, "c") == ["second"]
        for name in ("run-1", "run-2"):
            cell.scripts.run(calls.finish(name, "cancelled"))
        assert claimed(cell, "g") == ["first", "third"]

    def test_what_was_spilled_goes_on_under_its_numerics_id(self, cell: Cell) -> None:
        queue(cell, "first", "second")
        (run,) = cell.claim("c")
        cell.commit(run, 0, [7])
        cell.rerun(run, "drain")
        for name in ("run-1", "run-2"):
            cell.scripts.run(calls.finish(name, "cancelled"))
        assert claimed(cell, "g") == ["first"], "no bit of an answer changes"
        assert claimed(cell, "c") == ["second"]

    def test_shares_of_tenants_stay_as_they_are(self, cell: Cell) -> None:
        queue(cell, "first", "second")
        shares = f"{{t}}:shares:{MODEL}:gpu"
        before = cell.client.zrange(shares, 0, -1, withscores=True)
        assert claimed(cell, "c") == ["second"]
        assert cell.client.zrange(shares, 0, -1, withscores=True) == before, "no virtual time passes for those before"

    @pytest.mark.parametrize(
        "content",
        [
            replace(body(), fallback="deny"),
            replace(body(), fallback=limited_to(1e9)),  # nothing is predicted
            body(list(range(1, 10))),  # its prompt is longer than its answer
        ],
        ids=["deny", "a limit", "a long prompt"],
    )
    def test_some_do_not_spill(self, cell: Cell, content: RequestBody) -> None:
        queue(cell, "a", "b", "c", content=content)
        assert claimed(cell, "c") == []
        queue(cell, "last")
        assert claimed(cell, "c") == ["last"], "they do not hold up the next one"

    @pytest.mark.parametrize(("limit", "spilled"), [(1.4, []), (1.5, ["b"])])
    def test_a_limit_holds_here_too(self, cell: Cell, limit: float, spilled: list[str]) -> None:
        cell.scripts.run(calls.publish_slowdowns(MODEL, {WHOLE: 1.5}))
        queue(cell, "a", "b", content=replace(body(), fallback=limited_to(limit)))
        assert claimed(cell, "c") == spilled

    def test_exact_requests_are_for_cpus_anyway(self, cell: Cell) -> None:
        queue(cell, "a", content=replace(body(), exact=True))
        (run,) = cell.claim("c")
        assert (run.request_id, run.route_class) == ("a", "cpu")


class TestWhatIsKnown:
    @pytest.fixture
    def cell(self, gpus_first: Cell) -> Cell:
        """A GPU with one request, which is all it takes, and three that wait."""
        cell = gpus_first
        cell.worker("g", split=WHOLE, device="gpu", numerics="g", varies=True, slots=1)
        cell.worker("c", split=WHOLE, numerics="c")
        queue(cell, "run")
        assert claimed(cell, "g") == ["run"]
        queue(cell, "r0", "r1", "r2")
        return cell

    def test_nothing_spills_without_figures(self, cell: Cell) -> None:
        assert claimed(cell, "c") == []
        measure(cell, "c", 0.001)
        assert claimed(cell, "c") == [], "the GPU's time is not known"

    def test_a_prediction_stands_for_a_cpu_that_has_not_measured_itself(self, cell: Cell) -> None:
        measure(cell, "g", 2.0)
        assert claimed(cell, "c") == []
        cell.scripts.run(calls.publish_slowdowns(MODEL, {WHOLE: 2.5}))
        assert claimed(cell, "c") == ["r1"], "2.5 steps are more than 1 + 1, and less than 1 + 2"

    def test_measured_times_are_better_than_a_prediction(self, cell: Cell) -> None:
        measure(cell, "g", 2.0)
        measure(cell, "c", 3.0)
        cell.scripts.run(calls.publish_slowdowns(MODEL, {WHOLE: 99.0}))
        assert claimed(cell, "c")[0] == "r0"

    def test_a_gpu_without_requests_is_never_passed_over(self, cell: Cell) -> None:
        """A GPU that was slow once could never show otherwise if it got nothing to do."""
        measure(cell, "g", 99.0)
        measure(cell, "c", 1.0)
        cell.scripts.run(calls.finish("run", "cancelled"))
        assert claimed(cell, "c") == []

    def test_one_with_room_is_passed_over_when_it_has_too_many(self, cell: Cell) -> None:
        cell.scripts.run(calls.dead("g", silent_s=0, reason="drain"))
        cell.worker("h", split=WHOLE, device="gpu", numerics="g", varies=True, slots=8)
        queue(cell, "s1", "s2", "s3")
        cell.a_second_passes()
        assert len(claimed(cell, "h")) == 7, "those of before too"
        measure(cell, "h", 1.0, rows=1.0)
        measure(cell, "c", 8.0)
        queue(cell, "next")
        assert claimed(cell, "c") == [], "a step beside seven others takes as long there"
        measure(cell, "c", 7.5)
        assert claimed(cell, "c") == ["next"]


class TestOfALaterStage:
    @pytest.fixture
    def cell(self, gpus_first: Cell) -> Cell:
        """The second stage's GPU has room for one request; beside it a CPU has the stage."""
        cell = gpus_first
        cell.worker("c0", split=HALVES, stage=0, numerics="c")
        cell.worker("g1", split=HALVES, stage=1, device="gpu", numerics="g", varies=True, pages=2)
        cell.worker("c1", split=HALVES, stage=1, numerics="c")
        queue(cell, "run")
        (run,) = cell.claim("c0")
        assert run.route == ("c0", "g1")
        return cell

    @pytest.mark.parametrize(("ms", "route"), [(1.5, ("c0", "c1")), (2.5, None)])
    def test_takes_a_cpu_that_ends_sooner_than_one_that_must_be_waited_for(
        self, cell: Cell, ms: float, route: tuple[str, str] | None
    ) -> None:
        queue(cell, "next")
        assert cell.claim("c0") == [], "nothing is known: it waits"
        measure(cell, "g1", 1.0, first=3, blocks=2)
        measure(cell, "c1", ms, first=3, blocks=2)
        assert [run.route for run in cell.claim("c0")] == ([route] if route else [])

    def test_deny_waits(self, cell: Cell) -> None:
        measure(cell, "g1", 1.0, first=3, blocks=2)
        measure(cell, "c1", 0.5, first=3, blocks=2)
        queue(cell, "next", content=replace(body(), fallback="deny"))
        assert cell.claim("c0") == []

    def test_what_has_tokens_of_a_gpu_waits_for_one(self, cell: Cell) -> None:
        measure(cell, "g1", 1.0, first=3, blocks=2)
        measure(cell, "c1", 0.5, first=3, blocks=2)
        run = cell.record("run")["run"]
        cell.scripts.run(calls.commit([Commit(request_id="run", run_id=run, position=0, tokens=(7,))]))
        cell.scripts.run(calls.rerun("run", run, "drain"))
        cell.client.hset(cell.keys.worker("g1"), "pages_reserved", 2)  # as if another request had come meanwhile
        cell.client.sadd(cell.keys.worker_requests("g1"), "another")
        assert cell.claim("c0") == []
        queue(cell, "next")
        assert cell.claim("c0") == [], "it was here first"

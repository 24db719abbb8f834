"""The planner under any history of arrivals and deaths."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from blockrelay.protocol.plan import Plan, WorkerInfo, parse_split, uniform_split
from blockrelay.protocol.planned_split import equal_parts
from blockrelay_scheduler.planning.plan_builder import decide

SHAPES = st.integers(1, 80).flatmap(lambda blocks: st.tuples(st.just(blocks), st.integers(1, blocks)))


@given(SHAPES)
def test_every_block_is_in_exactly_one_stage_and_no_stage_is_empty(shape: tuple[int, int]) -> None:
    blocks, stages = shape
    split = uniform_split(blocks, stages)
    assert [b for stage in split for b in range(stage.first, stage.last + 1)] == list(range(1, blocks + 1))
    sizes = [stage.last - stage.first + 1 for stage in split]
    assert len(sizes) == stages and min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


@given(
    SHAPES,
    st.lists(st.tuples(st.booleans(), st.sampled_from(["cpu", "gpu"]), st.integers(0, 5)), max_size=30),
)
def test_no_arrival_or_death_moves_a_block_or_a_living_worker(
    shape: tuple[int, int], history: list[tuple[bool, str, int]]
) -> None:
    blocks, stages = shape
    living: list[WorkerInfo] = []
    plan: Plan | None = None
    for moment, (arrives, device, which) in enumerate(history):
        if arrives or not living:
            living.append(
                WorkerInfo(
                    id=f"w{moment}", model="m", device="gpu" if device == "gpu" else "cpu", numerics="n",
                    host="h", pid=moment, port=0, registered_ms=moment,
                )
            )  # fmt: skip
        else:
            living.pop(which % len(living))
        now = decide(living, planned=equal_parts(blocks, stages), current=plan).plan
        before: Plan | None = plan
        plan = now
        assert now.epoch == moment + 1
        assert set(now.assignments) == {w.id for w in living}
        assert set(now.blocks) == {f"block_{b}" for b in range(1, blocks + 1)}
        assert len(now.reasons) == len(parse_split(now.split)) == stages
        # Every other one has loaded what it was given.
        settled = [replace(w, split=now.split, stage=now.assignments[w.id], ready=w.pid % 2 == 0) for w in living]
        shown = decide(settled, planned=equal_parts(blocks, stages), current=now).plan
        assert shown.assignments == now.assignments, "whoever is ready"
        on_gpus = {w.stage for w in settled if w.device == "gpu" and w.ready}
        assert (shown.route_class == "gpu") == bool(on_gpus) and now.route_class == "cpu"
        for index, stage in enumerate(parse_split(now.split)):
            assert shown.blocks[f"block_{stage.last}"] == ("GPU" if index in on_gpus else "CPU")
        if before is not None:
            assert now.split == before.split
            kept = now.assignments.keys() & before.assignments.keys()
            assert all(now.assignments[w] == before.assignments[w] for w in kept)


@given(st.integers(1, 6), st.integers(0, 20))
def test_as_many_workers_as_stages_leave_no_stage_empty(stages: int, more: int) -> None:
    crowd = [
        WorkerInfo(id=f"w{i}", model="m", device="cpu", numerics="n", host="h", pid=i, port=0, registered_ms=i)
        for i in range(stages + more)
    ]
    plan = decide(crowd, planned=equal_parts(10, stages), current=None).plan
    counts = [list(plan.assignments.values()).count(s) for s in range(stages)]
    assert min(counts) >= 1 and max(counts) - min(counts) <= 1

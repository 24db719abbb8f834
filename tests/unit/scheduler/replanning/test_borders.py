"""What workers measure corrects the profile, and the borders between stages follow; pure."""

from dataclasses import replace

import pytest

from blockrelay.block_folder.analysis import BlockCost
from blockrelay.errors import BlockFolderError
from blockrelay.planning.profile import BlockProfile, Profile
from blockrelay.protocol.block_times import BlockTimes
from blockrelay.protocol.plan import Stage, WorkerInfo, parse_split, split_text
from blockrelay_scheduler.planning.cost_model import CostModel
from blockrelay_scheduler.replanning.borders import Load, System
from blockrelay_scheduler.replanning.corrections import SMOOTHING, Comparison, comparisons, corrected, device_of
from blockrelay_scheduler.replanning.measured_profile import MeasuredProfile
from tests.support.plan_problems import analysis

#: Twelve equal layers and a head, which is another kind of block; a millisecond each by the profile.
SIZES = [1000] * 12 + [5000]
COSTS = CostModel(
    analysis(13, sizes=SIZES),
    ("w8a8",) * 13,
    Profile(blocks={f"block_{n}": {"CPU": BlockProfile(seconds={1: 1e-3})} for n in range(1, 14)}),
)
LOAD = Load(requests=8, context=100)
SPLIT = "1-4,5-8,9-13"


def worker(
    stage: int, *, ms: float, head_ms: float = 1.0, split: str = SPLIT, node: str = "", threads: int = 1, **more: object
) -> WorkerInfo:
    """A worker whose layers took `ms` milliseconds each, and the head `head_ms` times `ms`; on a node of its own."""
    blocks = parse_split(split)[stage]
    seconds = tuple(ms * 1e-3 * (head_ms if n == 13 else 1.0) for n in range(blocks.first, blocks.last + 1))
    times = BlockTimes(first=blocks.first, seconds=seconds, rows=4.0, context=100.0, free_bytes=1 << 30)
    fields: dict[str, object] = {"loads_beside": True, "block_times": times, "cores": 2, **more}
    return WorkerInfo(
        id=f"h:{100 + stage}:abc", model="m", device="cpu", numerics="n", host="h", pid=100 + stage, port=0,
        registered_ms=0, split=split, stage=stage, first=blocks.first, last=blocks.last, ready=True,
        node=node or f"node-{stage}", threads=threads, **fields,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip


def system(*workers: WorkerInfo, costs: CostModel = COSTS, measured: MeasuredProfile | None = None) -> System:
    return System(
        costs=costs,
        measured=measured or corrected(costs, workers, MeasuredProfile()),
        stages=parse_split(workers[0].split),
        workers=tuple((one,) for one in workers),
        check_cut=lambda _: None,
        least_gain=0.15,
    )


def best(*workers: WorkerInfo, **more: object) -> str:
    return split_text(system(*workers, **more).best(LOAD).stages)  # pyright: ignore[reportArgumentType]


def test_layers_tell_how_slow_a_process_is_and_the_head_what_is_its_own() -> None:
    record = corrected(COSTS, [worker(0, ms=1), worker(1, ms=2), worker(2, ms=1.5, head_ms=4)], MeasuredProfile())
    assert record.processes == {"h:100": 1.0, "h:101": 2.0, "h:102": 1.5}
    assert record.blocks == {13: 4.0}


def test_a_process_with_the_head_alone_is_told_by_what_the_head_took_before() -> None:
    before = MeasuredProfile(processes={"h:100": 1.0, "h:101": 3.0}, blocks={13: 4.0})
    lone = worker(1, ms=1, head_ms=4, split="1-12,13-13")
    record = corrected(COSTS, [worker(0, ms=1, split="1-12,13-13"), lone], before)
    assert record.processes == {"h:100": 1.0, "h:101": 3.0 - 2.0 * SMOOTHING} and record.blocks == {13: 4.0}


def test_what_was_not_measured_keeps_its_factor_and_a_process_that_is_gone_has_none() -> None:
    before = MeasuredProfile(processes={"h:100": 2.0, "h:900": 7.0}, blocks={13: 4.0}, better_since_ms=5)
    record = corrected(COSTS, [replace(worker(0, ms=1), block_times=None), worker(1, ms=1)], before)
    assert record == replace(before, processes={"h:100": 2.0, "h:101": 1.0})


def test_times_of_the_blocks_before_a_move_count_for_nothing() -> None:
    stale = replace(worker(0, ms=9), first=1, last=3)
    assert comparisons(COSTS, stale) == {}
    assert comparisons(COSTS, worker(0, ms=8))[1] == Comparison(predicted=1e-3, observed=8e-3)


@pytest.mark.parametrize(
    ("ms", "expected"),
    [
        pytest.param((1, 1, 1), SPLIT, id="as planned"),
        pytest.param((1, 1.1, 1), SPLIT, id="noise"),
        pytest.param((1, 2, 1), "1-6,7-7,8-13", id="one is half as fast: it bounds every step"),
        pytest.param((1, 8, 1), "1-7,8-8,9-13", id="one hardly works: a block is the least that it can have"),
        pytest.param((4, 4, 1), "1-2,3-4,5-13", id="one is fast"),
    ],
)
def test_blocks_leave_the_slow(ms: tuple[float, float, float], expected: str) -> None:
    assert best(*(worker(stage, ms=one) for stage, one in enumerate(ms))) == expected


def test_workers_that_share_cores_take_turns_so_that_only_the_sum_counts() -> None:
    """Each worker has as many threads as the machine has cores: the fastest one should have all blocks that it can."""
    together = [worker(stage, ms=one, node="one", threads=2) for stage, one in enumerate((1, 2, 1.01))]
    assert best(*together) == "1-7,8-8,9-13", "and the third, which is as fast, keeps what it has"


def test_the_gain_is_what_the_corrected_profile_says() -> None:
    alone = system(*(worker(stage, ms=one, node="one", threads=2) for stage, one in enumerate((1, 2, 1))))
    present, better = alone.present(LOAD), alone.best(LOAD)
    assert present.seconds - better.seconds == pytest.approx(3e-3), "three blocks by a millisecond each"


def test_borders_stay_where_one_cannot_load_another_stage_beside_its_own() -> None:
    """All workers load a stage of the new plan, also those whose blocks are the same."""
    assert best(worker(0, ms=1), worker(1, ms=8), worker(2, ms=1, loads_beside=False)) == SPLIT


def test_a_pool_must_hold_a_request_at_full_context() -> None:
    """A pool keeps its bytes, so it has fewer pages in a stage of more layers."""
    costs = CostModel(analysis(13, sizes=SIZES, kv=2), ("w8a8",) * 13, COSTS.profile)
    context = costs.analysis.context
    few, many = ((context * stages + 15) // 16 for stages in (1, 4))
    workers = [worker(0, ms=1, pages=few), worker(1, ms=8, pages=few), worker(2, ms=1, pages=few)]
    assert best(*workers, costs=costs) == SPLIT, "three layers more, and the pages of one request are too few"
    ample = [worker(stage, ms=ms, pages=many) for stage, ms in enumerate((1, 8, 1))]
    assert best(*ample, costs=costs) == "1-7,8-8,9-13"


def test_corrections_do_not_share_times() -> None:
    workers = [worker(stage, ms=1) for stage in range(3)]
    for factor in (4.0, 9.0):
        measured = MeasuredProfile(processes={}, blocks={13: factor})
        assert system(*workers, measured=measured).present(LOAD).seconds > 3e-3 * factor
    assert COSTS.each_block_seconds(device_of(workers[0], host="h"), 1, 100)[12] == 1e-3


def test_factors_of_very_fast_devices_are_above_zero() -> None:
    fast = worker(0, ms=1)
    times = fast.block_times
    assert times is not None
    quick = replace(fast, block_times=replace(times, seconds=(1e-9,) * 4))
    (factor,) = corrected(COSTS, [quick], MeasuredProfile()).processes.values()
    assert 0 < factor < 1e-5


def test_a_machine_must_have_memory_for_its_new_stages() -> None:
    first, slow = worker(0, ms=1), worker(1, ms=8)  # each on a machine of its own
    times = first.block_times
    assert times is not None

    def with_room(kilobytes: int) -> WorkerInfo:
        return replace(first, block_times=replace(times, free_bytes=1250 * kilobytes))

    assert best(with_room(7), slow, worker(2, ms=1)) == "1-7,8-8,9-13"
    assert best(with_room(4), slow, worker(2, ms=1)) == "1-4,5-5,6-13", "four fifths hold no fifth block"


def test_a_cut_that_the_model_does_not_allow_is_not_made() -> None:
    def never_behind_seven(stages: "tuple[Stage, ...]") -> None:
        if any(stage.last == 6 for stage in stages):
            raise BlockFolderError("a wire crosses the border behind block_6")

    whole = system(worker(0, ms=1), worker(1, ms=8), worker(2, ms=1))
    allowed = replace(whole, check_cut=never_behind_seven)  # pyright: ignore[reportArgumentType]
    assert split_text(allowed.best(LOAD).stages) in ("1-7,8-8,9-13", "1-5,6-7,8-13")


def test_blocks_of_one_kind_only_are_all_the_usual_ones() -> None:
    equal = CostModel(analysis(13), ("w8a8",) * 13, COSTS.profile)
    assert isinstance(equal.analysis.blocks[0], BlockCost)
    assert corrected(equal, [worker(2, ms=3, head_ms=1)], MeasuredProfile()).blocks == {}

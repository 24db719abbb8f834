"""What each strategy chooses, by examples that can be checked by hand."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from blockrelay.errors import UsageError
from blockrelay.planning.profile import Hop
from blockrelay_scheduler.planning.problem import NoPlan, Placement, Wishes
from blockrelay_scheduler.planning.strategies.registry import names, place
from tests.support.plan_problems import device, problem

#: Every block takes a second on a CPU and half of one on a GPU, whatever the rows.
EVEN = {"CPU": [{1: 1.0}] * 9, "GPU": [{1: 0.5}] * 9}


def ends(placement: Placement) -> list[int]:
    """The last block of each part."""
    return [part.last for part in placement.parts]


def on(placement: Placement) -> list[tuple[str, ...]]:
    return [part.devices for part in placement.parts]


@pytest.mark.parametrize(
    ("blocks", "parts", "expected"),
    [
        (9, 1, [9]),
        (9, 2, [4, 9]),  # eight layers: four each, and the head rides along
        (10, 2, [5, 10]),  # nine layers: the first part has one more
        (11, 3, [4, 7, 11]),
        (33, 4, [8, 16, 24, 33]),
        (3, 3, [1, 2, 3]),
    ],
)
def test_uniform_divides_layers(blocks: int, parts: int, expected: list[int]) -> None:
    seconds = {"CPU": [{1: 1.0}] * blocks}
    found = place("uniform", problem([device("a")], seconds, wishes=Wishes(parts=parts)))
    assert ends(found) == expected


def test_uniform_takes_the_devices_in_their_order_and_then_a_cpu() -> None:
    devices = [device("g", "GPU"), device("c")]
    found = place("uniform", problem(devices, EVEN, wishes=Wishes(parts=3, targets=("g",))))
    assert on(found) == [("g",), ("c",), ("c",)]


def test_memory_fills_devices_to_the_same_share() -> None:
    devices = [device("small", memory=3000), device("large", "GPU", memory=6000)]
    assert ends(place("memory", problem(devices, EVEN))) == [3, 9], "3 kB of 3 kB, 6 kB of 6 kB"


def test_memory_counts_kv_pages() -> None:
    devices = [device("a", memory=10**6), device("b", "GPU", memory=10**6)]
    seconds = {"CPU": [{1: 1.0}] * 4, "GPU": [{1: 1.0}] * 4}
    # Without KV pages the first two blocks weigh as much as the last two; with them the head is light.
    light = problem(devices, seconds, sizes=[1000, 1000, 1000, 1000], kv=0)
    heavy = problem(devices, seconds, sizes=[1000, 1000, 1000, 1000], kv=10, requests=4, context=100)
    assert (ends(place("memory", light)), ends(place("memory", heavy))) == ([2, 4], [2, 4])
    heavier = problem(devices, seconds, sizes=[1000, 1000, 1000, 4000], kv=10, requests=4, context=100)
    assert ends(place("memory", heavier)) == [2, 4], "10,000 and 9,000 bytes; weights alone would say [3, 4]"


def test_compute_evens_out_time() -> None:
    devices = [device("c"), device("g", "GPU")]
    assert ends(place("compute", problem(devices, EVEN))) == [3, 9], "three seconds each"


def test_a_slower_device_gets_less() -> None:
    devices = [device("slow", speed=0.5), device("fast")]
    assert ends(place("compute", problem(devices, EVEN))) == [3, 9], "six seconds each"


def test_mixed_lies_between_memory_and_compute() -> None:
    devices = [device("c", memory=8000), device("g", "GPU", memory=8000)]
    by_memory, by_time = (ends(place(name, problem(devices, EVEN)))[0] for name in ("memory", "compute"))
    assert by_time <= ends(place("mixed", problem(devices, EVEN)))[0] <= by_memory
    assert by_time < by_memory


def test_custom_is_taken_as_it_is() -> None:
    wishes = Wishes(boundaries=((1, 2), (3, 9)), targets=("g",))
    found = place("custom", problem([device("c"), device("g", "GPU")], EVEN, wishes=wishes))
    assert (ends(found), on(found)) == ([2, 9], [("g",), ("c",)]), "where no device was named a CPU computes"


@pytest.mark.parametrize(
    ("boundaries", "said"),
    [
        (((1, 4), (4, 9)), "block_4 is in two parts"),
        (((1, 4), (6, 9)), "block_5 is in no part"),
        (((1, 4), (5, 8)), "block_9 is in no part"),
        (((1, 4), (5, 10)), "no part 5-10 in a model of 9 blocks"),
        (((2, 9),), "block_1 is in no part"),
        (((1, 4), (5, 3)), "no part 5-3"),
        (None, "custom needs boundaries"),
    ],
)
def test_custom_boundaries_are_checked(boundaries: tuple[tuple[int, int], ...] | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        place("custom", problem([device("c")], EVEN, wishes=Wishes(boundaries=boundaries)))


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="there is no device npu: there are c"):
        place("uniform", problem([device("c")], EVEN, wishes=Wishes(targets=("npu",))))


def test_more_devices_than_parts_are_refused() -> None:
    wishes = Wishes(parts=1, targets=("c", "g"))
    with pytest.raises(UsageError, match="2 devices for 1 part"):
        place("uniform", problem([device("c"), device("g", "GPU")], EVEN, wishes=wishes))


@pytest.mark.parametrize(
    ("name", "wishes", "said"),
    [
        ("auto", Wishes(boundaries=((1, 9),)), "strategy auto does not go by boundaries: custom would"),
        ("auto", Wishes(parts=2), "strategy auto does not go by parts: uniform, memory, compute, mixed would"),
        ("uniform", Wishes(boundaries=((1, 9),)), "strategy uniform does not go by boundaries"),
        ("custom", Wishes(parts=2, boundaries=((1, 9),)), "strategy custom does not go by parts"),
        ("static-split", Wishes(parts=2), "strategy static-split does not go by parts"),
        ("static-split", Wishes(targets=("c",)), "static-split needs a GPU"),
        ("ring", Wishes(targets=("npu",)), "there is no device npu"),
    ],
)
def test_what_a_strategy_does_not_go_by_is_refused(name: str, wishes: Wishes, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        place(name, problem([device("c"), device("g", "GPU")], EVEN, wishes=wishes))


def test_a_part_above_its_limit_is_refused_with_what_is_missing() -> None:
    wishes = Wishes(boundaries=((1, 5), (6, 9)), memory_limit=4500)
    with pytest.raises(NoPlan, match="block_1 to block_5 need 5 kB: 500 B above the limit of a part"):
        place("custom", problem([device("c")], EVEN, wishes=wishes))


def test_what_would_fit_has_room_on_every_device() -> None:
    devices = [device("a", memory=20_000), device("b", memory=9000)]
    wishes = Wishes(boundaries=((1, 4), (5, 9)), targets=("a", "b"))
    tight = problem(devices, EVEN, kv=2, requests=4, context=1000, wishes=wishes)
    # (20,000 - 4,000) / (2 * 4 * 4) = 500 on a, (9,000 - 5,000) / (2 * 4 * 4) = 125 on b: the head has no KV pages
    with pytest.raises(NoPlan, match="4 requests of 125 tokens would fit"):
        place("custom", tight)
    place("custom", problem(devices, EVEN, kv=2, requests=4, context=125, wishes=wishes))


def test_no_strategy_fills_a_device_beyond_its_memory() -> None:
    devices = [device("c", memory=3000), device("g", "GPU", memory=20_000)]
    with pytest.raises(NoPlan, match="block_1 to block_4 need 4 kB on c, which has 3 kB: 1 kB short"):
        place("uniform", problem(devices, EVEN))


class TestStaticSplit:
    def test_it_tries_every_k(self) -> None:
        found = place("static-split", problem([device("c"), device("g", "GPU")], EVEN))
        assert found.notes == {
            "k": 3,
            "pipeline_time": 3.0,
            "cpu_time": 3.0,
            "gpu_time": 3.0,
            "summary": "k = 3: 3 blocks on the CPU, 6 on the GPU; the slower takes 3 s",
        }
        assert (ends(found), on(found)) == ([3, 9], [("c",), ("g",)])

    @pytest.mark.parametrize(
        ("cpu", "gpu", "k"),
        [
            ([0.1, 0.1, 0.1], [0.1, 0.3, 0.0001], 2),  # k = 1: max(0.1, 0.3001); k = 2: max(0.2, 0.0001); k = 3: 0.3
            ([1.0, 0.1], [0.1, 1.0], 1),  # k = 0: 1.1; k = 1: max(1.0, 1.0); k = 2: 1.1
            ([5.0, 1e-9], [5.0, 1e-9], 1),  # k = 2 is as good
            ([0.001] * 33, [1.0] * 33, 33),
            ([1.0] * 33, [0.001] * 33, 0),
        ],
    )
    def test_of_equal_ones_it_takes_the_smallest(self, cpu: list[float], gpu: list[float], k: int) -> None:
        seconds = {"CPU": [{1: one} for one in cpu], "GPU": [{1: one} for one in gpu]}
        found = place("static-split", problem([device("c"), device("g", "GPU")], seconds))
        assert found.notes is not None and found.notes["k"] == k
        assert on(found) == [("c",)] * (k > 0) + [("g",)] * (k < len(cpu))

    def test_it_needs_both_kinds(self) -> None:
        with pytest.raises(UsageError, match="static-split needs a GPU, and there is none"):
            place("static-split", problem([device("c")], EVEN))

    def test_a_block_that_was_not_measured_on_the_gpu_is_named(self) -> None:
        given = problem([device("c")], EVEN)
        assert given.costs.profile is not None
        blocks = dict(given.costs.profile.blocks)
        blocks = {name: {**classes, "GPU": classes["CPU"]} for name, classes in blocks.items()}
        del blocks["block_3"]["GPU"]
        costs = replace(given.costs, profile=replace(given.costs.profile, blocks=blocks))
        with pytest.raises(UsageError, match="the profile lacks block_3 on GPU"):
            place("static-split", replace(given, costs=costs))


class TestRing:
    def test_shares_are_those_of_memory(self) -> None:
        devices = [device("a", memory=4000), device("b", memory=16000), device("c", memory=12000)]
        found = place("ring", problem(devices, {"CPU": [{1: 1.0}] * 32}))
        # [0, 0.5), [0.5, 0.875), [0.875, 1): the largest first.
        assert (ends(found), on(found)) == ([16, 28, 32], [("b",), ("c",), ("a",)])

    def test_the_last_shard_ends_at_the_last_layer_whatever_is_rounded(self) -> None:
        devices = [device(name, memory=4000) for name in ("a", "b", "c")]
        assert ends(place("ring", problem(devices, {"CPU": [{1: 1.0}] * 10}))) == [3, 6, 10]

    def test_nobody_has_an_empty_shard(self) -> None:
        devices = [device("a", memory=100_000), device("b", memory=1), device("c", memory=2)]
        found = place("ring", problem(devices, {"CPU": [{1: 1.0}] * 4}, sizes=[1] * 4))
        assert all(part.first <= part.last for part in found.parts)
        assert ends(found)[-1] == 4

    def test_shares_may_be_those_of_speed(self) -> None:
        devices = [device("a", speed=1.0), device("b", speed=4.0), device("c", speed=3.0)]
        found = place("ring-speed", problem(devices, {"CPU": [{1: 1.0}] * 32}))
        assert (ends(found), on(found)) == ([16, 28, 32], [("b",), ("c",), ("a",)])
        assert found.parts[0].reason == "b has 50.0 % of all speed: [0, 0.5) of the model"

    def test_fractions_are_rounded_to_five_digits(self) -> None:
        # A third is 0.33333, so the first share ends at int(0.99999) = 0 and is left out.
        devices = [device(name, memory=100) for name in ("a", "b", "c")]
        found = place("ring", problem(devices, {"CPU": [{1: 1.0}] * 3}, sizes=[1] * 3))
        assert [(part.last, part.devices, part.reason.partition(": ")[2]) for part in found.parts] == [
            (1, ("b",), "[0.33333, 0.66666) of the model"),
            (3, ("a",), "[0.66666, 0.99999) of the model"),
        ]

    def test_memory_must_be_told(self) -> None:
        with pytest.raises(UsageError, match="ring needs the memory of every device: give a memory_bytes"):
            place("ring", problem([device("a")], EVEN))


class TestAuto:
    def test_one_fast_device_is_better_than_a_hop(self) -> None:
        devices = [device("c"), device("g", "GPU")]
        found = place("auto", problem(devices, EVEN, objective="latency", hop=Hop(seconds=0.1, seconds_per_byte=0)))
        assert (ends(found), on(found)) == ([9], [("g",)])

    def test_memory_sends_the_rest_elsewhere(self) -> None:
        devices = [device("c", memory=9000), device("g", "GPU", memory=5500)]
        found = place("auto", problem(devices, EVEN, objective="latency"))
        assert sorted(on(found)) == [("c",), ("g",)]
        (on_gpu,) = [part for part in found.parts if part.devices == ("g",)]
        assert on_gpu.last - on_gpu.first + 1 == 5, "as much as fits"

    def test_throughput_uses_replicas_where_weights_are_not_what_a_step_waits_for(self) -> None:
        seconds = {"GPU": [{1: 1.0, 64: 64.0}] * 4}
        devices = [device("g0", "GPU"), device("g1", "GPU")]
        hop = Hop(seconds=1.0, seconds_per_byte=0)
        found = place("auto", problem(devices, seconds, requests=8, hop=hop))
        assert on(found) == [("g0", "g1")], "two copies of the model: no hop"

    def test_cpus_of_one_host_are_one_resource(self) -> None:
        devices = [device("a", host="h"), device("b", host="h", speed=2.0)]
        assert on(place("auto", problem(devices, EVEN))) == [("b",)]

    def test_of_cpus_that_share_cores_the_slower_one_serves_where_the_faster_has_no_room(self) -> None:
        devices = [device("fast", host="h", speed=2.0, memory=1000), device("slow", host="h")]
        assert on(place("auto", problem(devices, EVEN))) == [("slow",)]

    def test_a_limit_is_named_as_one(self) -> None:
        wished = problem([device("c")], EVEN, wishes=Wishes(memory_limit=5000))
        said = r"no plan of auto fits with 5 kB at most for a device's one part: .* raise the limit, or add a device"
        with pytest.raises(NoPlan, match=said):
            place("auto", wished)

    def test_only_the_targets_have_to_be_known(self) -> None:
        devices = [device("c"), device("n", "NPU")]
        assert on(place("auto", problem(devices, EVEN, wishes=Wishes(targets=("c",))))) == [("c",)]

    def test_what_is_short_is_said(self) -> None:
        devices = [device("c", memory=2500), device("g", "GPU", memory=3000)]
        with pytest.raises(
            NoPlan, match=r"the model needs 9 kB .* all 2 devices together have room for 5.5 kB: 3.5 kB short"
        ):
            place("auto", problem(devices, EVEN))

    def test_a_block_that_fits_nowhere_is_named(self) -> None:
        devices = [device("c", memory=3500), device("g", "GPU", memory=3000)]
        sizes = [1000, 4000, 100, 100, 100, 100, 100, 100, 100]
        with pytest.raises(
            NoPlan,
            match=r"block_2 alone needs 4 kB .* device, c, has room for 3.5 kB: 500 B short; the weights alone do",
        ):
            place("auto", problem(devices, EVEN, sizes=sizes))

    def test_what_would_fit_is_said(self) -> None:
        devices = [device("c", memory=31_000)]
        tight = problem(devices, {"CPU": [{1: 1.0}] * 9}, kv=2, requests=4, context=1000)
        # (31,000 - 9,000) / (2 * 8 * 4), and (31,000 - 9,000) / (2 * 8 * 1000)
        with pytest.raises(NoPlan, match=r"4 requests of 34\d tokens, or 1 request of 1000 tokens would fit"):
            place("auto", tight)

    def test_fewer_requests_of_one_token_would_fit(self) -> None:
        many = problem([device("c", memory=31_000)], {"CPU": [{1: 1.0}] * 9}, kv=2, requests=10_000, context=1)
        with pytest.raises(NoPlan, match=r"have room|has room for 31 kB.*; 13\d\d requests of 1 token would fit"):
            place("auto", many)

    def test_a_stage_stays_where_it_is_because_the_next_device_is_full(self) -> None:
        seconds = {"CPU": [{1: 10.0}] * 7, "GPU": [{1: 1.0}] * 7}
        devices = [device("c", memory=10_000), device("g", "GPU", memory=5500)]
        found = place("auto", problem(devices, seconds, objective="latency"))
        assert [(part.last, part.reason) for part in found.parts] == [
            (5, "5 kB of 5.5 kB; g is 500 B short of room for block_6"),
            (7, "2 kB of 10 kB; g is 500 B short of room for block_6"),
        ]

    def test_or_because_a_block_more_would_take_longer(self) -> None:
        devices = [device("g0", "GPU", memory=7000), device("g1", "GPU", memory=7000)]
        found = place("auto", problem(devices, {"GPU": [{1: 1.0, 2: 2.0}] * 8}, requests=2))
        assert [(part.last, part.reason) for part in found.parts] == [
            (4, "4 kB of 7 kB; with block_5 too a step of 2 requests takes 10 s, now 8 s"),
            (8, "4 kB of 7 kB; a step of 2 requests takes 8 s, and no plan has a shorter one"),
        ]

    def test_it_keeps_to_devices_and_a_limit_that_were_asked_for(self) -> None:
        devices = [device("c"), device("g0", "GPU"), device("g1", "GPU")]
        wishes = Wishes(targets=("c", "g1"), memory_limit=6000)
        found = place("auto", problem(devices, EVEN, objective="latency", wishes=wishes))
        assert sorted((part.devices, part.last - part.first + 1) for part in found.parts) == [(("c",), 3), (("g1",), 6)]


def test_every_strategy_has_a_name() -> None:
    ours = ["auto", "uniform", "memory", "compute", "mixed", "custom", "static-split", "ring", "ring-speed"]
    assert names()[: len(ours)] == ours
    with pytest.raises(UsageError, match="there is no strategy best: there are auto, uniform"):
        place("best", problem([device("c")], EVEN))


@pytest.mark.parametrize("classes", [["NPU"], ["CPU", "NPU"]])
def test_a_device_of_a_class_that_nobody_measured_is_refused(classes: Sequence[str]) -> None:
    devices = [device(f"d{at}", name) for at, name in enumerate(classes)]
    with pytest.raises(UsageError, match=r"class NPU was not measured \(measured: CPU, GPU\)"):
        place("auto", problem(devices, EVEN))

"""Costs of devices that were profiled, that are described, and of precisions that were not measured."""

from dataclasses import replace

import pytest

from blockrelay.errors import UsageError
from blockrelay.planning.devices import Device, DeviceLink, Fleet
from blockrelay.planning.profile import BlockProfile, Hop, ProductTimes, Profile
from blockrelay_scheduler.planning.cost_model import DEFAULT_HOP, CostModel
from tests.support.plan_problems import analysis, device

PROFILE = Profile(
    blocks={f"block_{n}": {"CPU": BlockProfile(seconds={1: 1.0, 11: 3.0})} for n in (1, 2)},
    hop={"redis": Hop(seconds=0.5, seconds_per_byte=0.01)},
)
GPU = Device(id="g", device_class="GPU", host="b", bytes_per_second=1e4, operations_per_second=1e5)


def costs(profile: Profile | None = PROFILE) -> CostModel:
    return CostModel(analysis(2, kv=10), ("w8a8", "w8a8"), profile)


def test_a_profiled_class_is_divided_by_the_speed() -> None:
    assert costs().seconds(device("c"), 1, 2, 6, 128) == pytest.approx(4.0)
    assert costs().seconds(device("c", speed=0.5), 1, 2, 6, 128) == pytest.approx(8.0)
    assert not costs().is_estimated(device("c"))


def test_a_described_device_reads_its_weights_and_kv() -> None:
    assert costs().seconds(GPU, 1, 1, 1, 0) == pytest.approx(1000 / 1e4)
    assert costs().seconds(GPU, 1, 1, 2, 100) == pytest.approx((1000 + 2 * 100 * 10) / 1e4)
    assert costs().is_estimated(GPU)


def test_or_computes_for_longer() -> None:
    assert costs().seconds(GPU, 1, 1, 100, 0) == pytest.approx(100 * 2000 / 1e5)


def test_another_precision_changes_what_one_row_takes() -> None:
    converted = replace(costs(), precisions=("w4a8", "w8a8"), measured_in=("w8a8", "w8a8"))
    assert converted.seconds(device("c"), 1, 1, 1, 128) == pytest.approx(0.5), "half the bytes"
    assert converted.seconds(device("c"), 1, 1, 11, 128) == pytest.approx(2.5), "what ten more rows add stays"
    assert converted.is_estimated(device("c"))
    assert converted.weight_bytes(1, 2, device("c")) == 500 + 1000


def test_or_what_its_products_take() -> None:
    products = {
        "w8a8": ProductTimes(layer={1: 0.8, 11: 2.0}, head={1: 0.1}),
        "w4a8": ProductTimes(layer={1: 0.5, 11: 3.0}, head={1: 0.3}),
    }
    profiled = replace(PROFILE, products={"CPU": products})
    converted = replace(costs(profiled), precisions=("w4a8", "w4a8"), measured_in=("w8a8", "w8a8"))
    assert converted.seconds(device("c"), 1, 1, 1, 128) == pytest.approx(1 - 0.8 + 0.5)
    assert converted.seconds(device("c"), 1, 1, 11, 128) == pytest.approx(3 - 2 + 3), "rows cost more in groups"
    assert converted.is_estimated(device("c"))


def test_a_link_adds_to_the_way_over_redis() -> None:
    a, b = device("c", host="a"), GPU
    linked = Fleet(devices=(a, b), links=(DeviceLink(between=("b", "a"), seconds=2.0, seconds_per_byte=0.1),))
    assert costs().hop_seconds(linked, a, b, 3 * 100) == pytest.approx(2.5 + 3 * 100 * 0.11)
    assert costs().hop_seconds(Fleet(devices=(a, b)), a, b, 3 * 100) == pytest.approx(0.5 + 3 * 100 * 0.01)
    assert costs(None).hop_seconds(Fleet(devices=(a, b)), a, b, 0) == DEFAULT_HOP.seconds


def test_a_profile_of_another_model_is_refused() -> None:
    other = CostModel(analysis(3), ("w8a8",) * 3, PROFILE)
    with pytest.raises(
        UsageError, match="another model: it has 2 blocks, the model made-up has 3, and block_3 is not in the profile"
    ):
        other.check(Fleet(devices=(device("c"),)))
    fewer = CostModel(analysis(1), ("w8a8",), PROFILE)
    with pytest.raises(UsageError, match="it has 2 blocks, the model made-up has 1, which has no block_2"):
        fewer.check(Fleet(devices=(device("c"),)))


def test_bytes_are_those_that_were_measured_on_the_class() -> None:
    blocks = {name: {"CPU": BlockProfile(seconds={1: 1.0}, bytes=7)} for name in PROFILE.blocks}
    measured = costs(replace(PROFILE, blocks=blocks))
    assert measured.weight_bytes(1, 2, device("c")) == 14
    assert measured.weight_bytes(1, 2, device("g", "GPU")) == 2000, "nobody measured that class"
    converted = replace(measured, precisions=("w4a8", "w8a8"), measured_in=("w8a8", "w8a8"))
    assert converted.weight_bytes(1, 2, device("c")) == 500 + 7, "the first was measured in another precision"


def test_a_cpu_may_need_more_for_a_block_than_others() -> None:
    model = analysis(2)
    wide = replace(model, blocks=tuple(replace(block, cpu_bytes=2000) for block in model.blocks))
    found = CostModel(wide, ("w8a8", "w8a8"))
    assert [found.weight_bytes(1, 2, one) for one in (device("c"), device("g", "GPU"))] == [4000, 2000]


def test_what_a_stage_hands_on_may_grow_with_the_context() -> None:
    model = analysis(2)
    masked = replace(model, blocks=tuple(replace(block, hop_bytes_per_row_and_token=2) for block in model.blocks))
    assert CostModel(masked, ("w8a8", "w8a8")).hop_bytes(1, 50) == 100 + 2 * 50


def test_a_device_that_nobody_knows_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"device n: class NPU was not measured \(measured: none, there is no profile\)"
    ):
        costs(None).check(Fleet(devices=(device("n", "NPU"),)))

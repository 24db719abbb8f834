"""What a load needs, against files, layouts, sums by hand, and rules that hold for every load."""

import json
from dataclasses import replace
from functools import cache
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockrelay.block_folder.analysis import analyse
from blockrelay.block_folder.folder import open_block_folder
from blockrelay.block_folder.manifest import ROTARY_NAME
from blockrelay.block_folder.model import PRECISIONS, Precision
from blockrelay.errors import UsageError
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_converter.policy import FIRST_TOKEN_DISK_S, PLANNED_SHARE
from blockrelay_converter.sizing import measured
from blockrelay_converter.sizing.capacity import Capacity, ExpectedLoad, ModelNeed, capacity, disk_effect, model_need
from blockrelay_converter.sizing.shapes import SHAPES
from blockrelay_worker.execution.page_layout import layout_of, pages_for
from tests.support.project import ROOT

analysed = cache(analyse)
#: Enough for arithmetic.
few = settings(max_examples=40)
LOAD = ExpectedLoad(requests_per_second=20, prompt=512, new=256, context=32_768)


def need(name: str, precision: Precision = "w8a8", load: ExpectedLoad = LOAD) -> ModelNeed:
    shape = SHAPES[name]
    return model_need(analysed(shape), (precision,) * shape.blocks, load, head_dim=shape.head_dim)


def found(load: ExpectedLoad = LOAD, pace: float = 500.0) -> Capacity:
    return capacity(need("8b", load=load), load, pace)


class TestModel:
    @pytest.mark.parametrize("stages", [1, 2, 7])
    def test_weights_are_the_bytes_of_a_converted_folder(self, stages: int) -> None:
        folder = open_block_folder(BUNDLED_MODEL, blocks=[])
        model, files = folder.model, folder.manifest.files
        load = ExpectedLoad(requests_per_second=1, prompt=100, new=50, context=model.max_position, stages=stages)
        said = model_need(analyse(model), folder.manifest.precisions, load, head_dim=model.head_dim)
        blocks = [files[block.file].bytes for block in folder.manifest.blocks]
        assert said.weight_bytes == pytest.approx(sum(blocks), rel=0.01)
        assert said.rotary_bytes == files[ROTARY_NAME].bytes
        for stage in said.stages:
            assert stage.weight_bytes == pytest.approx(sum(blocks[stage.first - 1 : stage.last]), rel=0.01)

    @pytest.mark.parametrize("stages", [1, 2, 7])
    def test_keys_and_values_are_pages_of_the_executor(self, stages: int) -> None:
        folder = open_block_folder(BUNDLED_MODEL, blocks=[])
        load = ExpectedLoad(requests_per_second=1, prompt=100, new=55, context=1000, stages=stages, at_once=3)
        said = model_need(analyse(folder.model), folder.manifest.precisions, load, head_dim=folder.model.head_dim)
        for stage in said.stages:
            page = layout_of(folder, stage.first, stage.last).bytes_per_page
            assert stage.kv_bytes == 3 * pages_for(155) * page
        whole = layout_of(folder, 1, folder.model.blocks).bytes_per_page
        assert said.kv_bytes_per_request == pages_for(155) * whole
        assert said.kv_bytes_per_context == pages_for(1000) * whole

    @pytest.mark.parametrize(
        ("name", "parameters"), [("1b", 1.236e9 + 128_256 * 2048), ("8b", 8.03e9), ("70b", 70.55e9)]
    )
    def test_named_shapes_have_the_size_that_their_cards_say(self, name: str, parameters: float) -> None:
        assert analyse(SHAPES[name]).totals()["parameters"] == pytest.approx(parameters, rel=0.001)

    def test_eight_billion_parameters_by_hand(self) -> None:
        said = need("8b")
        assert said.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
        assert said.kv_bytes_per_context == 32_768 * said.kv_bytes_per_token
        assert said.weight_bytes == pytest.approx(8.03e9 + 128_256 * 4096, rel=0.01), "the embedding has 16 bits"
        assert need("8b", "w4a8").weight_bytes < 0.68 * said.weight_bytes
        assert need("8b", "fp32").kv_bytes_per_token == 2 * said.kv_bytes_per_token

    def test_a_cpu_widens_what_a_gpu_takes_as_it_is(self) -> None:
        (fp16,), (fp32,) = need("8b", "fp16").stages, need("8b", "fp32").stages
        assert fp16.cpu_weight_bytes == fp32.weight_bytes
        assert fp16.gpu_memory == fp16.weight_bytes + fp16.kv_bytes

    def test_rows_go_from_each_stage_to_the_next(self) -> None:
        staged = replace(LOAD, stages=4)
        said = need("70b", load=staged)
        assert said.hop_bytes_per_row == 3 * 4 * 8192
        wanted = capacity(said, staged, 100.0)
        assert wanted.payload_bytes_per_second == 20 * 256 * 3 * 4 * 8192
        assert wanted.payload_prompt_bytes_per_second == 20 * 512 * 3 * 4 * 8192
        assert found().payload_bytes_per_second == 0, "one stage sends nothing"

    def test_more_stages_than_blocks_are_refused(self) -> None:
        with pytest.raises(UsageError, match="stages"):
            need("8b", load=replace(LOAD, stages=34))


class TestLoad:
    @pytest.mark.parametrize(
        "change",
        [{"requests_per_second": 0}, {"requests_per_second": float("nan")}, {"prompt": 0}, {"new": -1},
         {"stages": 0}, {"at_once": 0}, {"context": 767}, {"prompt": 10**12}],
    )  # fmt: skip
    def test_what_no_system_can_have_is_refused(self, change: dict[str, float]) -> None:
        with pytest.raises(UsageError, match="--"):
            ExpectedLoad(**{"requests_per_second": 1, "prompt": 512, "new": 256, "context": 8192, **change})  # pyright: ignore

    def test_workers_are_busy_for_their_share(self) -> None:
        assert found(pace=20 * 256 / PLANNED_SHARE / 3).routes == 3
        assert found(replace(LOAD, stages=2), pace=20 * 256 / PLANNED_SHARE / 3).workers == 6


class TestDisk:
    def test_no_disk_takes_what_it_is_said_to_need(self) -> None:
        said = found()
        for name in ("fsync_step_s", "fsync_first_token_s"):
            assert said.disk.fsync_needed_s <= getattr(said.disk, name)
        assert disk_effect(said, said.disk.fsync_step_s).steps_a_commit == pytest.approx(1.0)
        assert disk_effect(said, 2 * said.disk.fsync_step_s).steps_a_commit == pytest.approx(2.0)
        assert disk_effect(said, said.disk.fsync_first_token_s).first_token_s == pytest.approx(FIRST_TOKEN_DISK_S)

    def test_writes_share_syncs_where_the_disk_is_slow(self) -> None:
        said = found()
        assert disk_effect(said, said.disk.fsync_own_s).writes_a_sync == pytest.approx(1.0)
        slow = disk_effect(said, 10 * said.disk.fsync_own_s)
        assert slow.writes_a_sync == pytest.approx(10.0)
        assert slow.syncs_per_second * slow.writes_a_sync == pytest.approx(said.disk.syncs_per_second)

    def test_a_sync_a_hundredth_of_a_second_long(self) -> None:
        idle = replace(found(), redis_cpu=0.0, step_s=0.01)
        effect = disk_effect(idle, 0.01)
        assert effect.syncs_per_second == pytest.approx(100)
        assert effect.first_token_s == pytest.approx(0.06), "ACCEPT, CLAIM, COMMIT: the sync under way and their own"
        assert (effect.commits_per_second_a_worker, effect.steps_a_commit) == (pytest.approx(50), pytest.approx(2))


loads = st.builds(
    ExpectedLoad,
    requests_per_second=st.floats(0.01, 1000),
    prompt=st.integers(1, 16_000),
    new=st.integers(1, 4000),
    context=st.integers(20_000, 131_072),
    stages=st.integers(1, 33),
    at_once=st.integers(1, 512),
)


@few
@given(loads, st.floats(1, 1e5), st.floats(1, 10))
def test_more_requests_never_need_less(load: ExpectedLoad, pace: float, times: float) -> None:
    model = need("8b", load=load)
    less = capacity(model, load, pace)
    more = capacity(model, replace(load, requests_per_second=times * load.requests_per_second), pace)
    for name in (
        "workers", "requests_at_once", "cells", "gateways", "redis_commands_per_second", "redis_cpu", "redis_bytes",
        "gateway_cpu", "payload_bytes_per_second", "client_bytes_per_second",
    ):  # fmt: skip
        assert getattr(more, name) >= getattr(less, name) * (1 - 1e-9), name
    assert more.disk.device_bytes_per_second >= less.disk.device_bytes_per_second
    assert more.disk.syncs_per_second >= less.disk.syncs_per_second


@few
@given(loads, st.integers(0, 3000), st.integers(0, 3000), st.sampled_from(PRECISIONS))
def test_longer_requests_never_need_less_memory(
    load: ExpectedLoad, prompt: int, context: int, precision: Precision
) -> None:
    less = need("8b", precision, load)
    longer = replace(load, context=load.context + prompt + context, prompt=load.prompt + prompt)
    more = need("8b", precision, longer)
    assert more.weight_bytes == less.weight_bytes
    for name in ("rotary_bytes", "kv_bytes_per_request", "kv_bytes_per_context"):
        assert getattr(more, name) >= getattr(less, name), name
    assert sum(s.cpu_memory for s in more.stages) >= sum(s.cpu_memory for s in less.stages)
    assert sum(s.kv_bytes for s in less.stages) == load.at_once * less.kv_bytes_per_request


@few
@given(loads, st.floats(1, 1e5), st.floats(1, 100))
def test_faster_workers_are_fewer(load: ExpectedLoad, pace: float, times: float) -> None:
    model = need("1b", load=replace(load, stages=1))
    slow, fast = (capacity(model, load, one) for one in (pace, pace * times))
    assert fast.workers <= slow.workers and fast.requests_at_once <= slow.requests_at_once * (1 + 1e-9)


def test_every_measured_figure_has_a_source() -> None:
    figures = [one for one in vars(measured).values() if isinstance(one, measured.Cost | measured.Measured)]
    assert len(figures) > 8
    assert {one.source for one in figures} <= measured.SOURCES.keys()


def test_costs_of_streams_are_those_of_the_simulator() -> None:
    content = json.loads((ROOT / "docs/one-million-streams.json").read_text())
    costs, footprint = content["costs"], content["footprint"]
    request = costs["accept"] + costs["claim"] + costs["claim_job"] + costs["wake"] + costs["commit_end"]
    assert measured.REDIS_CPU.request == pytest.approx(request + 4 * costs["call"], rel=0.01)
    assert measured.REDIS_CPU.token == pytest.approx(costs["commit_token"], rel=0.01)
    assert measured.REDIS_CPU.commit == pytest.approx(costs["call"] + costs["commit"], rel=0.01)
    assert measured.GATEWAY_CPU.request == pytest.approx(costs["gateway_request"], rel=0.01)
    assert measured.GATEWAY_CPU.token == pytest.approx(costs["gateway_token"], rel=0.01)
    assert measured.GATEWAY_READ_S.value == pytest.approx(costs["gateway_read"], rel=0.01)
    assert measured.CLIENT_TOKEN_BYTES.value == pytest.approx(footprint["client_token"], rel=0.01)


def test_the_pace_of_a_core_lies_between_prompts_and_new_tokens_of_the_benchmarks() -> None:
    shape = replace(
        SHAPES["1b"], vocab_size=32_000, intermediate_size=8192, name="1.1B parameters, as docs/benchmarks.md tells"
    )
    blocks = analyse(shape).blocks
    layers, head = (sum(block.flops_per_row for block in some) for some in (blocks[:-1], blocks[-1:]))
    records = json.loads((ROOT / "docs/benchmarks.json").read_text())["records"]
    ours = [one for one in records if (one["part"], one["side"]) == ("peers", "Blockrelay w8a8")]
    served = [one for record in ours for report in record["reports"] for one in report["gateway"]]
    at_once = [one for one in served if one["requests"] == 16]
    assert at_once
    decoding = fmean(one["decode_tok_s"] * (layers + head) / 2 for one in at_once)
    reading = fmean(one["prompt_tok_s"] * layers / 2 for one in at_once)
    assert decoding < measured.CORE_OPERATIONS.value < reading

"""What `blockrelay generate --explain` makes of steps: lines, records, totals."""

import json

import pytest

from blockrelay.protocol.plan import Stage
from blockrelay_worker.offline.explanation import heading, step_lines, step_records, totals
from blockrelay_worker.offline.pipeline import PipelineStep, StageRun


def run(stage: int, rows: int, given: tuple[int, ...], *, on: str = "cpu", device: bool = False) -> StageRun:
    return StageRun(
        stage=stage,
        device_class="gpu" if device else "cpu",
        device=on,
        blocks=Stage(first=3 * stage + 1, last=3 * stage + 3),
        taken=(rows,) if stage == 0 else (rows, 4096),
        given=given,
        kv_s=0.001,
        transfer_s=0.002 * stage,
        compute_s=0.5,
        total_s=0.51,
    )


def step(rows: int, token: int, total_s: float) -> PipelineStep:
    runs = run(0, rows, (rows, 4096)), run(1, rows, (1, 128256), on="webgpu:0", device=True)
    return PipelineStep(runs=runs, token=token, sampling_s=0.01, total_s=total_s)


TEXT_COLUMNS, TIMES = ("step", "stage", "device", "blocks", "input", "output"), ("transfer", "compute", "KV")
STEPS = [step(512, 128009, 1.5), step(1, 7, 1.1), step(1, 8, 1.3)]


def test_a_step_has_a_line_for_each_stage_that_fits_a_terminal() -> None:
    lines = [*heading(512), *(line for n, one in enumerate(STEPS, 1) for line in step_lines(n, one, None))]
    assert "prompt of 512 tokens" in lines[0]
    assert lines[1].split() == [
        "step",
        "stage",
        "device",
        "blocks",
        "input",
        "output",
        "transfer",
        "compute",
        "KV",
        "token",
    ]
    assert lines[2].split() == ["1", "0", "cpu", "1-3", "[512]", "[512,", "4096]", "0.000", "500.000", "1.000"]
    assert lines[3].split() == [
        "1", "webgpu:0", "4-6", "[512,", "4096]", "[1,", "128256]", "2.000", "500.000", "1.000", "128009",
    ]  # fmt: skip
    assert len(lines) == 2 + 2 * len(STEPS)
    assert max(map(len, lines)) <= 100
    at = lines[1].index("token")
    assert [line[at:] for line in lines[2:]] == ["", "128009", "", "7", "", "8"], "in one column"


def test_onnx_runtime_on_a_cpu_is_told_from_our_own_kernels() -> None:
    one = PipelineStep(runs=(run(0, 1, (1, 9), device=True),), token=1, sampling_s=0.0, total_s=1.0)
    assert "cpu device" in step_lines(1, one, None)[0]


def test_a_prompt_in_chunks_has_a_line_for_each_run_and_its_token_once() -> None:
    chunks = (*STEPS[0].runs, *STEPS[0].runs)
    one = PipelineStep(runs=chunks, token=5, sampling_s=0.0, total_s=3.0)
    assert one.rows == 1024
    ends = [line.split()[-1] for line in step_lines(1, one, None)]
    assert ends == ["1.000", "1.000", "1.000", "5"]


def test_totals_are_the_sums_and_nothing_is_left_out() -> None:
    found = totals(STEPS)
    assert (found.inferences, found.tokens, found.prompt_tokens) == (3, 3, 512)
    assert found.inference_s == pytest.approx(3.0)
    assert found.state_transfer_s == pytest.approx(0.006)
    assert found.cache_management_s == pytest.approx(0.006)
    assert found.token_generation_s == pytest.approx(0.03)
    assert (found.total_s, found.first_token_s) == (pytest.approx(3.9), 1.5)
    assert found.other_s == pytest.approx(3.9 - 3.0 - 0.006 - 0.006 - 0.03)
    assert found.next_token_s == pytest.approx(1.2)
    assert found.tokens_per_s == pytest.approx(3 / 3.9)
    assert found.lines() == [
        "total 3900.000 ms: compute 3000.000, transfer 6.000, KV 6.000, sampling 30.000, other 858.000",
        "3 tokens in 3 steps, 0.8 tokens/s; first token after 1500.000 ms, then 1200.000 ms each",
    ]
    alone = totals(STEPS[:1])
    assert alone.next_token_s is None and alone.lines()[1].endswith("first token after 1500.000 ms")


def test_records_are_json_with_the_shapes_and_seconds_of_each_run() -> None:
    records = json.loads(json.dumps(step_records(STEPS, None)))
    assert [(one["step"], one["rows"], one["token"], one["text"]) for one in records] == [
        (1, 512, 128009, None), (2, 1, 7, None), (3, 1, 8, None),
    ]  # fmt: skip
    assert records[0]["stages"][1] == {
        "stage": 1, "class": "gpu", "device": "webgpu:0", "blocks": "4-6", "input": [512, 4096], "output": [1, 128256],
        "transfer_s": 0.002, "compute_s": 0.5, "kv_s": 0.001, "total_s": 0.51,
    }  # fmt: skip

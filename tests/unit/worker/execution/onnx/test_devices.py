"""The list of this machine's devices: names, abilities, and why a device cannot be used."""

import json
import os
import subprocess
import sys
from pathlib import Path

import onnxruntime as ort
import pytest

from blockrelay.extras import how_to_install
from blockrelay_worker.execution.onnx.devices import FoundDevice, cuda_devices, devices_here
from blockrelay_worker.execution.onnx.providers.cuda import CudaProvider
from blockrelay_worker.execution.onnx.providers.nvidia_driver import visible
from blockrelay_worker.execution.onnx.providers.opening import open_provider
from tests.support.worker.nvidia_smi import install_smi

A, B, C = ("0", "GPU-aa11"), ("1", "GPU-bb22"), ("2", "GPU-ab33")


@pytest.mark.parametrize(
    ("variable", "shown"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        (" 1 ", [1]),
        ("0,7,1", [0]),
        ("-1", []),
        ("1,1", [1]),
        ("GPU-bb22,GPU-aa", [1, 0]),
        ("GPU-a,1", []),
    ],
)
def test_cuda_shows_what_its_variable_says(variable: str | None, shown: list[int]) -> None:
    assert visible([A, B, C], variable) == shown


def test_nvidia_tells_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the package that computes on them is missing, which is then said."""
    install_smi(tmp_path, monkeypatch)
    one, other = cuda_devices({"CUDA_VISIBLE_DEVICES": "1,0"})
    assert (one.id, one.name, one.uuid, one.memory_bytes) == ("cuda:0", "NVIDIA GB10", "GPU-bb22", None)
    assert (other.id, other.name, other.memory_bytes) == ("cuda:1", "NVIDIA H200", 143771 << 20)
    assert one.driver == "580.95.05" and "install '.[cuda]'` in" in one.problem and not one.features
    assert one.missing and other.missing
    assert not cuda_devices({"CUDA_VISIBLE_DEVICES": ""})


def test_without_a_driver_there_is_nothing_of_nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not cuda_devices({})


def test_a_package_without_a_driver_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    (found,) = cuda_devices({})
    assert found.id == "cuda" and "no GPU that nvidia-smi" in found.problem


def test_a_gpu_without_its_libraries_says_what_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This ONNX Runtime has no CUDA, whatever it says."""
    install_smi(tmp_path, monkeypatch)
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    for found in cuda_devices({}):
        assert "cuda" in found.problem and "libonnxruntime_providers_cuda.so" in found.problem and not found.features


def test_openvino_has_a_class_for_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["OpenVINOExecutionProvider"])
    bindings = sys.modules["onnxruntime.capi._pybind_state"]
    monkeypatch.setattr(bindings, "get_available_openvino_device_ids", lambda: ["CPU", "GPU", "NPU"], raising=False)
    found = {one.id: one for one in devices_here({})}
    assert [found[f"openvino:{name}"].kind for name in ("GPU", "NPU")] == ["gpu", "npu"]
    assert "openvino:CPU" not in found
    assert found["openvino:NPU"].problem  # this ONNX Runtime has no OpenVINO, whatever it says


def test_a_plugin_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_webgpu", None)
    found = {one.id: one for one in devices_here({})}
    assert not found["cpu"].problem and found["cpu"].memory_bytes
    assert found["webgpu"].problem == f"webgpu needs the plug-in: {how_to_install('webgpu')}"
    assert found["webgpu"].missing and not found["cpu"].missing


def test_a_device_that_fails_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as what it needs is here."""
    install_smi(tmp_path, monkeypatch)
    monkeypatch.setattr(CudaProvider, "check_installed", lambda: None)
    monkeypatch.setattr(CudaProvider, "session", _lost)
    for found in cuda_devices({}):
        assert (found.problem, found.missing, found.features) == ("uncorrectable ECC error", False, ())


def _lost(*_: object, **__: object) -> None:
    raise RuntimeError("CUDA failure 214: uncorrectable ECC error")


def told(environment: dict[str, str]) -> dict[str, FoundDevice]:
    """What the command says, by id."""
    command = [sys.executable, "-m", "blockrelay_worker.offline.devices", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    return {one["id"]: FoundDevice(**one | {"features": tuple(one["features"])}) for one in report["devices"]}


@pytest.mark.software_gpu
@pytest.mark.driver_on_cpu
def test_a_driver_that_computes_on_cpus_is_told_from_a_gpu() -> None:
    found = told(dict(os.environ))["webgpu:0"]
    assert not found.problem and found.features == ("f32",) and "on this CPU" in found.name
    open_provider(found.id)


@pytest.mark.software_gpu
@pytest.mark.driver_on_cpu
def test_a_driver_that_computes_on_cpus_must_be_admitted() -> None:
    variable = "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER"
    found = told({name: value for name, value in os.environ.items() if name != variable})
    assert "webgpu:0" in found or f"{variable}=1 admits" in found["webgpu"].problem


@pytest.mark.software_gpu
@pytest.mark.driver_on_cpu
def test_a_device_without_a_driver_says_what_it_said(tmp_path: Path) -> None:
    found = told(os.environ | {"VK_DRIVER_FILES": str(tmp_path / "none.json"), "LD_LIBRARY_PATH": ""})["webgpu:0"]
    assert found.problem and not found.features

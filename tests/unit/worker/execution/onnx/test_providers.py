"""The sessions that each provider asks ONNX Runtime for, and its errors."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from blockrelay.errors import UsageError
from blockrelay_worker.execution.onnx.compiled.graphs import compiled_graphs
from blockrelay_worker.execution.onnx.graphs.stage import sum_graph
from blockrelay_worker.execution.onnx.providers.cuda import CudaProvider, missing_library
from blockrelay_worker.execution.onnx.providers.directml import DirectMlProvider
from blockrelay_worker.execution.onnx.providers.opening import open_provider
from blockrelay_worker.execution.onnx.providers.openvino import OpenVinoProvider
from tests.support.worker.nvidia_smi import install_smi

NO_FALLBACK = "session.disable_cpu_ep_fallback"


@pytest.fixture
def built_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ONNX Runtime that says that it has all of them. CUDA's order of devices is what it was afterwards."""
    names = [provider.ort_name for provider in (CudaProvider, OpenVinoProvider, DirectMlProvider)]
    monkeypatch.setattr(ort, "get_available_providers", lambda: [*names, "CPUExecutionProvider"])
    bindings = sys.modules["onnxruntime.capi._pybind_state"]
    monkeypatch.setattr(bindings, "get_available_openvino_device_ids", lambda: ["CPU", "GPU", "NPU"], raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("directml:0", r"directml needs Windows, and onnxruntime-directml.*\.\[directml\]"),
        ("directml", r"directml needs Windows"),
        ("cuda:0", r"cuda needs onnxruntime-gpu in an environment of its own.*\.\[cuda\].*--gpu-python"),
        ("GPU-8f01", r"cuda needs onnxruntime-gpu"),
        ("openvino:NPU", r"openvino needs onnxruntime-openvino.*\.\[openvino\]"),
    ],
)
def test_the_package_that_is_missing_is_named(device: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        open_provider(device)


@pytest.mark.usefixtures("built_with")
def test_directml_has_its_options() -> None:
    """Those that its documents demand."""
    provider, options = open_provider("directml:1"), ort.SessionOptions()
    assert isinstance(provider, DirectMlProvider) and provider.device == "directml:1"
    assert provider.add_to(options) == [("DmlExecutionProvider", {"device_id": 1})]
    recording = ort.SessionOptions()
    provider.add_to(recording, capture=True)
    assert provider.captures and recording.get_session_config_entry("ep.dml.enable_graph_capture") == "1"
    assert not options.enable_mem_pattern and options.execution_mode == ort.ExecutionMode.ORT_SEQUENTIAL
    assert options.get_session_config_entry(NO_FALLBACK) == "1"


@pytest.mark.usefixtures("built_with")
@pytest.mark.parametrize("device", ["cuda:0", "GPU-bb22", "GPU-b"])
def test_cuda_has_its_options(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its number or the beginning of its UUID, in the order that people see."""
    install_smi(tmp_path, monkeypatch)
    provider, options = open_provider(device, {"CUDA_VISIBLE_DEVICES": "1,0"}), ort.SessionOptions()
    assert isinstance(provider, CudaProvider) and provider.device == "cuda:0"
    assert "NVIDIA GB10" in provider.identity and os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    [(name, chosen)] = provider.add_to(options)
    assert name == "CUDAExecutionProvider" and chosen == {
        "device_id": "0",
        "arena_extend_strategy": "kSameAsRequested",
        "use_tf32": "0",
    }
    assert options.get_session_config_entry(NO_FALLBACK) == "1"
    assert options.get_session_config_entry("session.use_device_allocator_for_initializers") == "1"
    [(_, recording)] = provider.add_to(ort.SessionOptions(), capture=True)
    assert provider.captures and isinstance(recording, dict) and recording.pop("enable_cuda_graph") == "1"
    assert recording == chosen


@pytest.mark.usefixtures("built_with")
@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("cuda:2", r"no device cuda:2 here, but cuda:0 \(GPU-aa11\), cuda:1 \(GPU-bb22\)"),
        ("GPU-cc", r"no device GPU-cc here, but cuda:0 \(GPU-aa11\)"),
        ("openvino:GPU.1", r"no device openvino:GPU.1 here, but openvino:GPU, openvino:NPU \("),
        ("openvino:CPU", r"no device openvino:CPU here"),
    ],
)
def test_what_is_there_is_said_of_a_device_that_is_not(
    device: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_smi(tmp_path, monkeypatch)
    with pytest.raises(UsageError, match=said):
        open_provider(device, {})


@pytest.mark.usefixtures("built_with")
def test_no_gpu_is_none_of_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_smi(tmp_path, monkeypatch)
    with pytest.raises(UsageError, match="no device cuda:0 here, but none of its kind"):
        open_provider("cuda:0", {"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.usefixtures("built_with")
def test_openvino_has_its_options() -> None:
    provider, options = open_provider("openvino:NPU"), ort.SessionOptions()
    assert isinstance(provider, OpenVinoProvider) and provider.device == "openvino:NPU"
    [(name, chosen)] = provider.add_to(options)
    assert name == "OpenVINOExecutionProvider"
    assert chosen == {"device_type": "NPU", "precision": "ACCURACY", "num_of_threads": "1"}
    assert options.get_session_config_entry(NO_FALLBACK) == "1"
    assert not provider.captures and not provider.saves_graphs


@pytest.mark.usefixtures("built_with")
def test_openvino_keeps_what_it_compiles_by_device_and_versions(tmp_path: Path) -> None:
    folders: set[Any] = set()
    for device in ("openvino:NPU", "openvino:GPU", "openvino:NPU"):
        provider = open_provider(device)
        provider.compiled = compiled_graphs(tmp_path, {})
        [(_, chosen)] = provider.add_to(ort.SessionOptions())
        assert isinstance(chosen, dict)
        folders.add(chosen["cache_dir"])
    assert len(folders) == 2 and all(Path(folder).parent == tmp_path for folder in folders)
    assert all(Path(folder).stat().st_mode & 0o777 == 0o700 for folder in folders)


def test_the_library_that_is_missing_is_named(tmp_path: Path) -> None:
    """By what the loader says, which names one that a library needs in the same way."""
    assert missing_library(tmp_path / "libcudnn.so.9") == "libcudnn.so.9"
    (tmp_path / "libcublas.so.13").write_text("no library")
    assert missing_library(tmp_path / "libcublas.so.13").startswith("what libcublas.so.13 needs (")
    assert missing_library(Path(sys.modules["onnxruntime.capi.onnxruntime_pybind11_state"].__file__ or "")) == ""


@pytest.mark.parametrize("device", ["abacus:0", "webgpu:first", "directml:-1", "openvino", "GPU-", "cuda:0 ", ""])
def test_what_is_no_device(device: str) -> None:
    with pytest.raises(UsageError, match="is not a device of ONNX Runtime"):
        open_provider(device)


@pytest.mark.software_gpu
@pytest.mark.driver_on_cpu
def test_what_is_larger_than_any_buffer_of_the_device_is_refused_with_its_size() -> None:
    provider = open_provider("webgpu:0")
    session = provider.session(sum_graph("float32"))
    with pytest.raises(UsageError, match=r"^webgpu:0 has no buffer of 1,073,807,360 bytes, as \[16384, 16385\] in "):
        provider.empty(session, (1 << 14, (1 << 14) + 1), np.float32)  # SwiftShader's have 2**30 bytes at most
    assert provider.upload(session, np.ones(3, np.float32)).numpy().tolist() == [1, 1, 1]

"""What is asked of ONNX Runtime for each device."""

import onnxruntime as ort
import pytest

from blockrelay.errors import UsageError
from blockrelay_worker.execution.onnx.providers import DirectMlProvider, open_provider


@pytest.mark.parametrize("device", ["directml:0", "directml"])
def test_directml_is_asked_for_where_it_can_be(device: str) -> None:
    with pytest.raises(UsageError, match=r"directml needs Windows.*blockrelay\[directml\]"):
        open_provider(device)


def test_directml_has_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that its documents demand."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["DmlExecutionProvider", "CPUExecutionProvider"])
    provider, options = open_provider("directml:1"), ort.SessionOptions()
    assert isinstance(provider, DirectMlProvider) and provider.device == "directml:1"
    assert provider.add_to(options) == [("DmlExecutionProvider", {"device_id": 1})]
    assert not options.enable_mem_pattern and options.execution_mode == ort.ExecutionMode.ORT_SEQUENTIAL
    assert options.get_session_config_entry("session.disable_cpu_ep_fallback") == "1"


@pytest.mark.parametrize("device", ["abacus:0", "webgpu:first", "directml:-1", ""])
def test_what_is_no_device(device: str) -> None:
    with pytest.raises(UsageError, match="is no device of ONNX Runtime"):
        open_provider(device)

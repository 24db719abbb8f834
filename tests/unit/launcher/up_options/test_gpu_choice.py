"""Which GPUs `up --gpu-workers N` takes."""

import sys
from pathlib import Path

import pytest

from blockrelay.errors import UsageError
from blockrelay_launcher.up_options.gpu_choice import check_named, chosen, first_gpus


def device(name: str, vendor: str = "", kind: str = "gpu", problem: str = "") -> dict[str, str]:
    return {"id": name, "vendor": vendor, "kind": kind, "problem": problem}


CPU, NPU = device("cpu", kind="cpu"), device("openvino:NPU", "Intel", kind="npu")
NONE = device("webgpu", problem="webgpu needs the plug-in")


def test_the_first_ones_are_taken() -> None:
    found = [
        CPU,
        device("cuda:0", "NVIDIA", problem="no libcudnn.so.9"),
        device("cuda:1", "NVIDIA"),
        device("webgpu:0"),
    ]
    assert chosen(found, 1) == ("cuda:1",)
    assert chosen(found, 2) == ("cuda:1", "webgpu:0")


def test_a_card_that_two_providers_show_is_one() -> None:
    found = [
        device("cuda:0", "NVIDIA"),
        device("webgpu:0", "NVIDIA"),
        device("webgpu:1", "AMD"),
        device("webgpu:2", "AMD"),
    ]
    assert chosen(found, 3) == ("cuda:0", "webgpu:1", "webgpu:2")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([CPU], r"--gpu-workers 2: here is no GPU that can be used \(none was found\)"),
        ([CPU, NPU, NONE], r"no GPU that can be used \(webgpu: webgpu needs the plug-in\)"),
        ([CPU, NPU, device("cuda:0")], r"--gpu-workers 2: here is cuda:0; see"),
    ],
)
def test_what_there_is_is_said_where_it_is_too_little(found: list[dict[str, str]], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        chosen(found, 2)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("webgpu:1", "--gpu webgpu:1: webgpu needs the plug-in"),
        ("cuda:7", "--gpu cuda:7: no such device here, but cuda:1; see"),
        ("cuda:0", "--gpu cuda:0: no libcudnn.so.9"),
    ],
)
def test_a_gpu_that_is_named_can_be_used(name: str, said: str) -> None:
    card = device("cuda:1", "NVIDIA") | {"uuid": "GPU-8f12"}
    here = [CPU, device("cuda:0", problem="no libcudnn.so.9"), card, NONE]
    check_named(here, ["cuda:1", "cpu"])
    check_named(here, ["GPU-8f"])
    with pytest.raises(UsageError, match=said):
        check_named(here, ["cuda:1", name])


@pytest.mark.parametrize("names", [["cuda:1", "cuda:1"], ["cuda:1", "GPU-8f"]])
def test_a_gpu_is_named_once(names: list[str]) -> None:
    card = device("cuda:1", "NVIDIA") | {"uuid": "GPU-8f12"}
    with pytest.raises(UsageError, match=f"--gpu {names[1]}: cuda:1 is named twice"):
        check_named([CPU, card], names)


def test_it_is_asked_for_under_the_python_of_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f"""#!{sys.executable}
import json
print(json.dumps({{"devices": [{device("cuda:0")!r}]}}))
""")
    python.chmod(0o755)
    monkeypatch.setenv("BLOCKRELAY_GPU_PYTHON", str(python))
    assert first_gpus(1) == ("cuda:0",)
    python.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('error: two of them')\n")
    with pytest.raises(UsageError, match="ended with code 1: error: two of them"):
        first_gpus(1)
    monkeypatch.setenv("BLOCKRELAY_GPU_PYTHON", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="cannot be run"):
        first_gpus(1)

"""Which GPUs of this machine `up` takes."""

import sys
from pathlib import Path
from typing import Any

import pytest

from blockrelay.errors import UsageError
from blockrelay_launcher.up_options.device_binding import HostGpu
from blockrelay_launcher.up_options.gpu_choice import checked, chosen, first_gpus, gpus_here, known_gpus, named_gpus


def device(
    name: str, vendor: str = "", kind: str = "gpu", problem: str = "", *, missing: bool = False
) -> dict[str, Any]:
    return {"id": name, "vendor": vendor, "kind": kind, "problem": problem, "missing": missing}


CPU, NPU = device("cpu", kind="cpu"), device("openvino:NPU", "Intel", kind="npu")
NONE = device("webgpu", problem="webgpu needs the plug-in", missing=True)


def ids(gpus: tuple[HostGpu, ...]) -> tuple[str, ...]:
    return tuple(gpu.id for gpu in gpus)


def test_the_first_ones_are_taken() -> None:
    found = [
        CPU,
        device("cuda:0", "NVIDIA", problem="no libcudnn.so.9", missing=True),
        device("cuda:1", "NVIDIA"),
        device("webgpu:0"),
    ]
    assert ids(chosen(found, 1)) == ("cuda:1",)
    assert ids(chosen(found, 2)) == ("cuda:1", "webgpu:0")


def test_one_that_fails_its_probe_comes_last() -> None:
    """It is here: what began with it begins again without it."""
    found = [CPU, device("webgpu:0", problem="device lost"), device("webgpu:1")]
    assert chosen(found, 2) == (
        HostGpu(id="webgpu:1", device="webgpu:1"),
        HostGpu(id="webgpu:0", device="webgpu:0", problem="device lost"),
    )


def test_a_card_that_two_providers_show_is_one() -> None:
    found = [
        device("cuda:0", "NVIDIA"),
        device("webgpu:0", "NVIDIA"),
        device("webgpu:1", "AMD"),
        device("webgpu:2", "AMD"),
    ]
    assert ids(chosen(found, 3)) == ("cuda:0", "webgpu:1", "webgpu:2")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([CPU], r"--gpu-workers 2: here is no GPU that can be used \(none was found\)"),
        ([CPU, NPU, NONE], r"no GPU that can be used \(webgpu: webgpu needs the plug-in\)"),
        ([CPU, NPU, device("cuda:0")], r"--gpu-workers 2: here is cuda:0; see"),
    ],
)
def test_what_there_is_is_said_where_it_is_too_little(found: list[dict[str, Any]], said: str) -> None:
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
def test_a_gpu_that_is_named_is_here(name: str, said: str) -> None:
    card = device("cuda:1", "NVIDIA") | {"uuid": "GPU-8f12"}
    here = [CPU, device("cuda:0", problem="no libcudnn.so.9", missing=True), card, NONE]
    assert ids(checked(here, ["cuda:1", "cpu"])) == ("cuda:1", "cpu")
    assert checked(here, ["GPU-8f"]) == (HostGpu(id="cuda:1", device="GPU-8f"),)
    with pytest.raises(UsageError, match=said):
        checked(here, ["cuda:1", name])


def test_a_gpu_that_is_named_and_fails_its_probe_is_taken() -> None:
    (found,) = checked([CPU, device("cuda:0", problem="uncorrectable ECC error")], ["cuda:0"])
    assert found == HostGpu(id="cuda:0", device="cuda:0", problem="uncorrectable ECC error")


@pytest.mark.parametrize("names", [["cuda:1", "cuda:1"], ["cuda:1", "GPU-8f"]])
def test_a_gpu_is_named_once(names: list[str]) -> None:
    card = device("cuda:1", "NVIDIA") | {"uuid": "GPU-8f12"}
    with pytest.raises(UsageError, match=f"--gpu {names[1]}: cuda:1 is named twice"):
        checked([CPU, card], names)


def test_it_is_asked_for_under_the_python_of_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f"""#!{sys.executable}
import json
print(json.dumps({{"devices": [{device("cuda:0")!r}]}}))
""")
    python.chmod(0o755)
    monkeypatch.setenv("BLOCKRELAY_GPU_PYTHON", str(python))
    assert ids(first_gpus(1)) == ids(gpus_here()) == ids(named_gpus(["cuda:0"])) == ("cuda:0",)
    assert known_gpus([HostGpu(id="gpu0", device="cuda:0")]) == (HostGpu(id="gpu0", device="cuda:0"),)
    with pytest.raises(UsageError, match="--topology, device cuda:1: no such device here, but cuda:0"):
        known_gpus([HostGpu(id="gpu0", device="cuda:1")])
    python.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('blockrelay: two of them')\n")
    with pytest.raises(UsageError, match="ended with code 1: two of them"):
        first_gpus(1)
    python.write_text("#!/bin/sh\nkill -11 $$\n")  # as a driver does
    (found,) = named_gpus(["cuda:0"])
    assert found.problem == "blockrelay devices was ended by signal 11"
    with pytest.raises(UsageError, match="--gpu magic:0: blockrelay devices was ended by signal 11"):
        named_gpus(["magic:0"])
    monkeypatch.setenv("BLOCKRELAY_GPU_PYTHON", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="cannot be run"):
        first_gpus(1)

"""The device that a worker moves to when its own cannot do its work."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import DeviceFailed, DeviceLost, UsageError
from blockrelay_worker.execution.process.executors import DeviceExecutors, Gpu
from blockrelay_worker.lifecycle.device.claims import DeviceClaims
from blockrelay_worker.lifecycle.device.next_device import OtherDevices, devices_of_host, in_order

pytestmark = pytest.mark.thorough


def device(name: str, vendor: str = "", *, kind: str = "gpu", problem: str = "", uuid: str = "") -> dict[str, Any]:
    return {"id": name, "kind": kind, "vendor": vendor, "problem": problem, "uuid": uuid}


HOST = [
    device("cpu", kind="cpu"),
    device("cuda:0", "NVIDIA", uuid="GPU-aa"),
    device("cuda:1", "NVIDIA", uuid="GPU-bb"),
    device("webgpu:0", "Intel"),
    device("webgpu:1", "NVIDIA"),
    device("openvino:GPU", "Intel"),
    device("openvino:NPU", "Intel", kind="npu"),
    device("directml:0", problem="not here"),
]


@pytest.mark.parametrize(
    ("own", "taken", "expected"),
    [
        ("cuda:0", [], ["cuda:1", "webgpu:1", "webgpu:0", "openvino:GPU", "openvino:NPU"]),
        ("GPU-aa", [], ["cuda:1", "webgpu:1", "webgpu:0", "openvino:GPU", "openvino:NPU"]),
        ("webgpu:0", [], ["webgpu:1", "openvino:GPU", "cuda:0", "cuda:1", "openvino:NPU"]),
        ("openvino:NPU", [], ["openvino:GPU", "webgpu:0", "cuda:0", "cuda:1", "webgpu:1"]),
        ("cuda:0", ["GPU-bb"], ["webgpu:0", "openvino:GPU", "openvino:NPU"]),
        ("cuda:0", ["webgpu:0"], ["cuda:1", "webgpu:1"]),
        ("cuda:7", ["GPU-aa", "GPU-bb"], ["webgpu:0", "openvino:GPU", "openvino:NPU"]),
        ("cpu", [], []),
    ],
)
def test_those_of_its_class_and_provider_come_first_and_none_that_may_be_taken(
    own: str, taken: list[str], expected: list[str]
) -> None:
    """webgpu:1 may be the card that another worker has as cuda:1."""
    assert in_order(HOST, own, taken) == expected


def test_devices_of_the_host_are_asked_for() -> None:
    assert devices_of_host(sys.executable, lambda: False)[0]["id"] == "cpu"
    assert devices_of_host(sys.executable, lambda: True) == devices_of_host("/nowhere", lambda: False) == []


_HOLDS = """
import sys
from pathlib import Path
from blockrelay_worker.lifecycle.device.claims import DeviceClaims
DeviceClaims(Path(sys.argv[1])).share("cuda:1")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_device_is_taken_as_long_as_the_process_of_its_worker_lives(tmp_path: Path) -> None:
    claims, command = DeviceClaims(tmp_path / "claims"), [sys.executable, "-c", _HOLDS, str(tmp_path / "claims")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        assert claims.taken("cuda:1") and not claims.take("cuda:1")
        claims.share("cuda:1")
        assert not claims.taken("cuda:1"), "two workers may be started for one"
        claims.give_back("cuda:1")
        assert not claims.taken("cuda:0") and claims.take("cuda:0")
    assert claims.take("cuda:1")


def test_where_nobody_can_tell_who_has_what_no_device_is_free(tmp_path: Path) -> None:
    (tmp_path / "claims").touch()
    claims = DeviceClaims(tmp_path / "claims")
    assert not claims.known and claims.taken("cuda:0")
    assert claims.take("cuda:0"), "but those that somebody has named are"


@pytest.fixture
def made(fp32: BlockFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[DeviceExecutors]]:
    """Executors that a test makes, in processes of failing_child.py; they are closed after the test."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("FAIL_TEXT", "moon phase")
    found: list[DeviceExecutors] = []
    yield found
    for one in found:
        one.close()


def begun(made: list[DeviceExecutors], folder: BlockFolder, name: str = "cpu:0") -> DeviceExecutors:
    module = "tests.support.worker.failing_child"
    made.append(DeviceExecutors(folder, Gpu(name, 30.0), module=module))
    return made[-1]


def never() -> bool:
    return False


def test_it_goes_on_with_the_next_one_that_can_and_comes_back_when_none_is_left(
    fp32: BlockFolder, made: list[DeviceExecutors], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAILS_ON", "cpu:0,cpu:2")
    elsewhere = DeviceClaims(tmp_path / "claims")
    executors = begun(made, fp32)
    others = OtherDevices("cpu:0", "abacus:0, cpu:1, cpu:2, cpu:0", python="", claims=DeviceClaims(tmp_path / "claims"))
    others.begins(executors)
    assert not others.take_next(executors, never), "nothing is wrong"
    numerics = {executors.numerics_id(fp32.manifest)}

    def cannot(name: str) -> None:
        with pytest.raises(DeviceLost, match=f"{name}: moon phase"):
            executors.load(fp32, 1, fp32.model.blocks, pages=8)

    cannot("cpu:0")
    assert others.take_next(executors, never) and executors.name == "cpu:1", "abacus:0 is no device"
    assert executors.usable_in_s() == 0.0 and elsewhere.taken("cpu:1") and elsewhere.taken("cpu:0")
    stage = executors.load(fp32, 1, fp32.model.blocks, pages=8)
    assert stage.details["device"] == "cpu:1"
    assert stage.capabilities.numerics_id == executors.numerics_id(fp32.manifest) not in numerics
    executors.give_up("it has seen enough")
    assert others.take_next(executors, never) and executors.name == "cpu:2" and not elsewhere.taken("cpu:1")
    cannot("cpu:2")
    assert not others.take_next(executors, never) and executors.name == "cpu:0" and not elsewhere.taken("cpu:2")
    assert {executors.numerics_id(fp32.manifest)} == numerics
    assert not others.are_left(never), "all were tried"
    assert executors.usable_in_s() <= 1 and executors.losses == 1, "its own"
    cannot("cpu:0")
    assert not others.take_next(executors, never) and executors.losses == 2


def test_one_that_another_worker_has_is_left_alone(
    fp32: BlockFolder, made: list[DeviceExecutors], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAILS_ON", "cpu:0")
    elsewhere = DeviceClaims(tmp_path / "claims")
    elsewhere.share("cpu:1")
    executors = begun(made, fp32)
    others = OtherDevices("cpu:0", "cpu:1,cpu:2", python="", claims=DeviceClaims(tmp_path / "claims"))
    with pytest.raises(DeviceLost):
        executors.load(fp32, 1, fp32.model.blocks, pages=8)
    assert others.take_next(executors, never) and executors.name == "cpu:2"


def test_a_device_that_is_lost_is_waited_for(fp32: BlockFolder, made: list[DeviceExecutors], tmp_path: Path) -> None:
    executors = begun(made, fp32)
    others = OtherDevices("cpu:0", "cpu:1", python="", claims=DeviceClaims(tmp_path / "claims"))
    executors._process._process.kill()  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(DeviceLost):
        executors.load(fp32, 1, fp32.model.blocks, pages=8)
    assert not others.take_next(executors, never)
    assert executors.name == "cpu:0" and executors.losses == 1 and executors.usable_in_s() > 0


@pytest.mark.parametrize("named", ["cpu:1", ""])
def test_one_that_cannot_be_opened_when_the_worker_starts(
    fp32: BlockFolder, made: list[DeviceExecutors], tmp_path: Path, named: str
) -> None:
    def make(name: str) -> DeviceExecutors:
        if name == "cpu:0":
            raise DeviceFailed("no room", reason="out_of_memory", code="OOM", capacity=True)
        return begun(made, fp32, name)

    others = OtherDevices("cpu:0", named, python="", claims=DeviceClaims(tmp_path / "claims"))
    if named:
        assert others.opened(make).name == "cpu:1"
    else:
        with pytest.raises(DeviceFailed, match="no room"):
            others.opened(make)
    with pytest.raises(UsageError):
        OtherDevices("abacus:0", "cpu:1", python="").opened(lambda name: begun(made, fp32, name))

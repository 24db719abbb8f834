"""Optimised graphs that a device's process keeps for the next one, and its option to record steps."""

import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import UsageError
from blockrelay.settings import WorkerSettings, read_settings
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.loader import gpu_of
from blockrelay_worker.execution.process.care import DeviceCare
from blockrelay_worker.execution.process.executors import DeviceExecutors, Gpu
from blockrelay_worker.execution.process.stage import DeviceStage
from blockrelay_worker.lifecycle.workers import Workers
from tests.support.worker.devices import device_metrics

PROMPT = Batch(
    segments=[Segment(rows=20, first_position=0, pages=(3, 1))], tokens=np.arange(5, 25, dtype=np.int32), wanted=[19]
)


def begun(folder: BlockFolder, cache: Path | None, device: str = "cpu", *, eager: bool = False) -> DeviceExecutors:
    return DeviceExecutors(folder, Gpu(device, 60, cache=cache, eager=eager))


def files(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


def logits(stage: DeviceStage) -> bytes:
    found = stage.run(PROMPT).logits
    assert found is not None
    return found.tobytes()


@pytest.mark.thorough
def test_a_process_finds_what_the_one_before_has_kept(fp32: BlockFolder, tmp_path: Path) -> None:
    said: list[str] = []
    given: list[bytes] = []
    for _ in range(2):
        executors = begun(fp32, tmp_path / "cache")
        try:
            stage = executors.load(fp32, 1, 5, pages=8)
            assert "recorded" not in stage.details, "ONNX Runtime's CPU kernels record nothing"
            said.append(stage.details["graphs"])
            given.append(logits(stage))
        finally:
            executors.close()
    assert said[0].startswith("0 kept from before, ") and said[1].endswith(", 0 made") and given[0] == given[1]


@pytest.mark.thorough
def test_a_cache_that_cannot_be_is_gone_without(
    fp32: BlockFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_bytes(b"")
    executors = begun(fp32, tmp_path / "cache")
    try:
        stage = executors.load(fp32, 1, 2, pages=8)
        assert "graphs" not in stage.details
    finally:
        executors.close()
    line = capfd.readouterr().err.splitlines()[0]
    assert '"event_type": "CACHE_UNUSABLE"' in line and str(tmp_path / "cache") in line


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("settings", "cache", "eager"),
    [
        ({"gpu": "webgpu:0"}, "/x/blockrelay", False),
        ({"gpu": "webgpu:0", "cache_dir": "/y"}, "/y", False),
        ({"gpu": "webgpu:0", "cache_dir": "/y", "enforce_eager": True}, None, True),
        ({"gpu": "webgpu:0", "use_graph_cache": False}, None, False),
        ({"gpu": "webgpu:0", "graph_mode": "enforce-eager"}, None, True),
        ({"gpu": "webgpu:0", "graph_mode": "ENFORCE_EAGER", "enforce_eager": True}, None, True),
        ({"gpu": "webgpu:0", "graph_mode": "max-autotune"}, None, True),
        ({"gpu": "webgpu:0", "graph_mode": "MAX_AUTOTUNE", "use_graph_cache": True}, "/x/blockrelay", True),
        ({"gpu": "webgpu:0", "graph_mode": "use-graph-cache"}, "/x/blockrelay", True),
        ({"gpu": "webgpu:0", "graph_mode": "REDUCE_OVERHEAD"}, None, False),
        ({"gpu": "webgpu:0", "graph_mode": "reduce-overhead", "use_graph_cache": True}, "/x/blockrelay", False),
    ],
)
def test_settings_say_where_and_whether(
    fp32: BlockFolder, settings: dict[str, object], cache: str | None, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    gpu = gpu_of(WorkerSettings.model_validate(settings), fp32)
    assert gpu is not None and gpu.eager is eager and gpu.cache == (cache and Path(cache))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"enforce_eager": True, "graph_mode": "max-autotune"}, "enforce_eager and graph_mode max-autotune"),
        ({"graph_mode": "ENFORCE_EAGER", "use_graph_cache": True}, "enforce-eager and use_graph_cache"),
        ({"graph_mode": "use-graph-cache", "use_graph_cache": False}, "graph_mode use-graph-cache and"),
        ({"graph_mode": "enforce-eager", "enforce_eager": False}, "graph_mode enforce-eager and enforce_eager false"),
    ],
)
def test_graph_modes_that_contradict_each_other_end_a_worker(
    settings: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Workers(WorkerSettings.model_validate(settings)).run() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"blockrelay: {said}")


@pytest.mark.thorough
def test_a_graph_mode_that_nobody_has_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="BLOCKRELAY_GRAPH_MODE: Input should be 'max-autotune', "):
        read_settings(WorkerSettings, ["--graph-mode", "fastest"], program="worker")


@pytest.mark.thorough
def test_a_worker_without_a_gpu_compiles_nothing(fp32: BlockFolder) -> None:
    assert gpu_of(WorkerSettings(), fp32) is None


@pytest.mark.thorough
def test_eager_processes_keep_nothing(fp32: BlockFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    executors = begun(fp32, None, eager=True)
    try:
        assert not executors.load(fp32, 1, 2, pages=8).details.keys() & {"graphs", "recorded"}
    finally:
        executors.close()
    assert files(tmp_path) == 0


@pytest.mark.thorough
@pytest.mark.parametrize(("eager", "fails"), [(False, False), (False, True), (True, False)])
def test_repeated_steps_are_counted_and_so_is_giving_up(
    fp32: BlockFolder, eager: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    if fails:
        monkeypatch.setenv("REPEATING_FAILS", "1")
    module = "tests.support.worker.recording_child"
    executors = DeviceExecutors(fp32, Gpu("cpu", 60, eager=eager), module=module)
    try:
        stage, told = executors.load(fp32, 1, 5, pages=8), device_metrics()
        assert stage.details.get("recorded") == (None if eager else "decode steps of 2 shapes")
        care = DeviceCare(stage, told.group, canary_every_s=1e9)
        logits(stage)
        care.between_steps()
        before = told.value("device_repeated_steps")
        for position in range(20, 23):
            segment = Segment(rows=1, first_position=position, pages=(3, 1))
            stage.run(Batch(segments=[segment], tokens=np.array([position], np.int32), wanted=[0]))
            care.between_steps()
        assert told.value("device_repeated_steps") == before + (0 if eager or fails else 3)
        assert told.value("device_recording_failures") == fails
    finally:
        executors.close()


@pytest.mark.software_gpu
@pytest.mark.float16
@pytest.mark.driver_on_cpu
def test_a_driver_finds_the_shaders_of_the_process_before(
    fp16: BlockFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mesa's: SwiftShader has no cache. Tells how long a start takes, for docs/gpu.md."""
    monkeypatch.delenv("MESA_SHADER_CACHE_DIR", raising=False)
    seconds: list[float] = []
    kept: list[int] = []
    for _ in range(2):
        started = time.monotonic()
        executors = begun(fp16, tmp_path / "cache", "webgpu:0")
        try:
            executors.load(fp16, 2, 2, pages=8)
        finally:
            executors.close()
        seconds.append(time.monotonic() - started)
        kept.append(sum(path.stat().st_size for path in (tmp_path / "cache" / "shaders").rglob("*") if path.is_file()))
    assert kept[0] > 100_000 and kept[1] <= kept[0] * 1.01, "shaders were compiled again"
    with capsys.disabled():
        sys.stderr.write(f"\ncold: {seconds[0]:.1f} s, {kept[0]:,} bytes of shaders; warm: {seconds[1]:.1f} s\n")

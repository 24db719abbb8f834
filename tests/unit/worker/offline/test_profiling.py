"""The profiler on a real executor of a tiny model, and over a real Redis."""

from dataclasses import replace
from pathlib import Path

import pytest

from blockrelay.block_folder.analysis import analyse
from blockrelay.block_folder.folder import open_block_folder
from blockrelay.errors import UsageError
from blockrelay.planning.profile import decode_profile
from blockrelay_worker.execution.loader import executors_for
from blockrelay_worker.execution.page_layout import layout_of
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.offline.profiling import __main__ as profiling
from blockrelay_worker.offline.profiling import block_times, samples
from blockrelay_worker.offline.profiling.block_times import ROWS, BatchShape, shapes, windows
from blockrelay_worker.offline.profiling.hop_times import redis_hop, rows_of_ours, shared_memory_hop
from blockrelay_worker.offline.profiling.samples import Samples
from blockrelay_worker.offline.profiling.targets import stage_bytes
from tests.support.models.tiny_model import BLOCKS, write_tiny_model
from tests.support.redis.redis_server import RedisServer

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("profiled"))


def test_every_block_is_measured_in_every_shape(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "ROUND_S", 0.0)
    out = tmp_path / "p.json"
    assert profiling.run(["--model", str(folder), "--out", str(out), "--threads", "1"]) == 0
    profile = decode_profile(out.read_bytes(), "p.json")
    opened = open_block_folder(folder)
    assert (profile.model, profile.model_hash) == ("tiny", opened.manifest.model_hash)
    assert set(profile.blocks) == {f"block_{n}" for n in range(1, BLOCKS + 1)}
    assert set(profile.hop) == {"shared_memory"}, "no Redis was named"
    assert set(profile.products["CPU"]) == ({"w8a8", "w4a8"} if load_kernels(1).has_matmul else set())
    for times in profile.products["CPU"].values():
        assert set(times.layer) == set(times.head) == set(ROWS)
    for cost in analyse(opened.model).blocks:
        block = profile.blocks[cost.name]["CPU"]
        assert set(block.seconds) == set(block.spread) == set(ROWS)
        assert set(block.seconds_at_context) == {512}, "the model's own; 2,048 is beyond it"
        assert set(block.spread_at_context[512]) == set(ROWS) and block.load_spread is not None
        assert all(seconds > 0 for seconds in block.seconds.values())
        assert (block.bytes, block.kv_bytes_per_token) == (cost.bytes["w8a8"], 2 * cost.kv_values_per_token)
        assert block.load_seconds is not None and block.load_seconds > 0


def test_shapes_end_at_the_model_s_context(folder: Path) -> None:
    assert {shape.context for shape in shapes(open_block_folder(folder))} == {128, 512}


def test_a_model_that_does_not_fit_is_measured_in_windows(folder: Path) -> None:
    opened = open_block_folder(folder)
    measured = stage_bytes(opened, executors_for(opened, threads=1))
    wanted = [BatchShape(4, 128), BatchShape(64, 128)]
    sizes = [opened.manifest.files[block.file].bytes for block in opened.manifest.blocks]
    pages = 64 * 8 * layout_of(opened, 1, 1).bytes_per_page
    found = list(windows(opened, replace(measured, room=max(sizes) + pages), wanted))
    assert found[0].first == 1 and found[-1].last == BLOCKS and len(found) > 1
    assert [w.first for w in found[1:]] == [w.last + 1 for w in found[:-1]]
    (whole,) = windows(opened, replace(measured, room=10**9), wanted)
    assert (whole.first, whole.last, whole.pages) == (1, BLOCKS, 64 * 8)


def test_a_block_that_does_not_fit_is_named(folder: Path) -> None:
    opened = open_block_folder(folder)
    measured = stage_bytes(opened, executors_for(opened, threads=1))
    with pytest.raises(UsageError, match="block_1 does not fit into the 0 MiB"):
        list(windows(opened, replace(measured, room=1000), [BatchShape(1, 128)]))


def test_a_device_that_is_named_is_measured_block_by_block(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime's CPU provider, in the process that a worker would begin for it."""
    monkeypatch.setattr(samples, "ROUND_S", 0.0)
    monkeypatch.setattr(block_times, "EXTRA_ROUNDS", 0)
    monkeypatch.setattr(block_times, "ROWS", few := (1, 4))
    out = tmp_path / "p.json"
    assert profiling.run(["--model", str(folder), "--out", str(out), "--threads", "1", "--gpu", "cpu"]) == 0
    profile = decode_profile(out.read_bytes(), "p.json")
    assert profile.classes == ("CPU", "GPU")
    opened = open_block_folder(folder)
    for cost in analyse(opened.model).blocks:
        gpu = profile.blocks[cost.name]["GPU"]
        assert set(gpu.seconds) == set(few) and all(seconds > 0 for seconds in gpu.seconds.values())
        assert set(gpu.seconds_at_context) == {512} and (gpu.load_seconds or 0) > 0
        assert gpu.seconds != profile.blocks[cost.name]["CPU"].seconds


@pytest.mark.parametrize(
    ("gpu", "said"), [("cpu,cpu", "--gpu cpu: named twice"), ("webgpus", "'webgpus' is not a device")]
)
def test_a_device_that_cannot_be_measured_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], gpu: str, said: str
) -> None:
    out = tmp_path / "p.json"
    assert profiling.run(["--model", str(folder), "--out", str(out), "--threads", "1", "--gpu", gpu]) == 2
    assert said in capsys.readouterr().err and not out.exists()


def test_the_spread_is_half_the_distance_of_the_quartiles() -> None:
    found = Samples([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    assert (found.median, found.spread) == (4.0, 0.5)


def test_a_file_that_cannot_be_written_is_refused_before_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert profiling.run(["--out", "/nowhere/p.json"]) == 2
    assert "there is no folder /nowhere" in capsys.readouterr().err


def test_a_hop_over_redis_costs_messages_and_bytes(redis_server: RedisServer) -> None:
    hop = redis_hop(redis_server.url, rows_of_ours(4096))
    assert 0 < hop.seconds < 1
    assert 0 < hop.seconds_per_byte < 1e-6


def test_a_hop_through_shared_memory_is_a_copy() -> None:
    assert 0 < shared_memory_hop(rows_of_ours(4096)).seconds_per_byte < 1e-6

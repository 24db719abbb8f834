"""The profiler on ONNX blocks that others made, which run on ONNX Runtime's CPU provider in a device's process."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import UsageError
from blockrelay.onnx_blocks.served_shape import served_wiring
from blockrelay.planning.costs import costs_of
from blockrelay.planning.profile import decode_profile
from blockrelay_worker.offline.profiling import __main__ as profiling
from blockrelay_worker.offline.profiling import block_times, samples, targets
from blockrelay_worker.offline.profiling.block_times import BatchShape, BlockWindow, whole_window
from blockrelay_worker.offline.profiling.hop_times import rows_of_onnx_blocks
from blockrelay_worker.offline.profiling.targets import StageBytes
from tests.support.models.onnx_blocks_served import opened
from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks

pytestmark = pytest.mark.onnx_blocks
MODEL = ReferenceModel(layers=4)
BLOCKS = [f"block_{n}" for n in range(1, 6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
    root = tmp_path_factory.mktemp("profiled")
    return opened(write_reference_blocks(root / "my-blocks", MODEL), root / "cache", "--max-position", "160")


@pytest.fixture(autouse=True)
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "ROUND_S", 0.0)
    monkeypatch.setattr(block_times, "EXTRA_ROUNDS", 0)
    monkeypatch.setattr(block_times, "ROWS", (1, 4))


def run(folder: BlockFolder, out: Path, *options: str) -> int:
    return profiling.run(["--model", str(folder.root), "--out", str(out), "--threads", "1", *options])


def test_every_block_is_measured_as_it_is(folder: BlockFolder, tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    assert run(folder, out) == 0
    profile = decode_profile(out.read_bytes(), "p.json")
    assert (profile.model, profile.model_hash) == ("my-blocks", folder.manifest.model_hash)
    assert (list(profile.blocks), profile.classes, set(profile.hop)) == (BLOCKS, ("CPU",), {"shared_memory"})
    assert profile.products == {}, "there is no other precision that they could have"
    for cost in costs_of(folder).blocks:
        block = profile.blocks[cost.name]["CPU"]
        assert set(block.seconds) == set(block.seconds_at_context[160]) == {1, 4}
        assert all(seconds > 0 for seconds in block.seconds.values())
        assert (block.bytes, block.kv_bytes_per_token) == (cost.cpu_bytes, 2 * cost.kv_values_per_token)
        assert block.load_seconds is not None and block.load_seconds > 0


def test_blocks_that_have_no_room_together_are_measured_one_by_one(
    folder: BlockFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = max(cost.cpu_bytes or 0 for cost in costs_of(folder).blocks)
    monkeypatch.setattr(targets, "available_bytes", lambda: 2 * (largest + (1 << 20)))
    out = tmp_path / "p.json"
    assert run(folder, out) == 0
    profile = decode_profile(out.read_bytes(), "p.json")
    assert all(seconds > 0 for name in BLOCKS for seconds in profile.blocks[name]["CPU"].seconds.values())
    assert profile.blocks["block_2"]["CPU"].bytes == costs_of(folder).blocks[1].cpu_bytes, "as where all have room"


def test_the_source_s_form_has_a_row_s_seconds_on_a_cpu_and_a_gpu(folder: BlockFolder, tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    assert run(folder, out, "--form", "source", "--gpu", "cpu") == 0
    found = json.loads(out.read_text())
    assert list(found) == BLOCKS
    assert all(set(one) == {"CPU", "GPU"} and min(one.values()) > 0 for one in found.values())
    assert decode_profile(out.read_bytes(), "p.json").classes == ("CPU", "GPU"), "it is read, too"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu", "cpu,cpu"], "--gpu cpu: named twice"),
        (["--tensor-parallel", "2"], "--tensor-parallel is for our CPU kernels: leave it out with ONNX files"),
        (["--form", "source", "--gpu", "cpu,webgpu:0"], "--form source has a CPU and one GPU, and --gpu names 2"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    folder: BlockFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert run(folder, out := tmp_path / "p.json", *options) == 2
    shown = capsys.readouterr().err
    assert said in shown and shown.count("\n") == 1 and not out.exists()


def test_all_blocks_are_one_window_with_as_many_pages_as_have_room(folder: BlockFolder) -> None:
    sizes = StageBytes(weights=lambda first, last: 100 * (last - first + 1), page=lambda _first, _last: 10, room=1000)
    wanted = [BatchShape(1, 128), BatchShape(4, 128), BatchShape(4, 160)]  # 8, 32 and 40 pages
    assert whole_window(folder, sizes, wanted) == (BlockWindow(1, 5, 40), None)
    assert whole_window(folder, replace(sizes, room=850), wanted) == (BlockWindow(1, 5, 35), None)
    assert whole_window(folder, replace(sizes, room=819), wanted) == (BlockWindow(1, 5, 32), 499)
    with pytest.raises(UsageError, match="block_1 does not fit into the 0 MiB"):
        whole_window(folder, replace(sizes, room=419), wanted)


def test_a_hop_carries_the_tensors_by_name(folder: BlockFolder) -> None:
    rows = rows_of_onnx_blocks(served_wiring(folder.root), 2, context=128)
    cost = costs_of(folder).blocks[1]
    assert rows.bytes == cost.hop_bytes_per_row + 128 * cost.hop_bytes_per_row_and_token
    message = rows.message(3)
    assert len(message.segments) == 3 and len(message.tensors[2][0].arrays) == 4
    assert len(message.encode()["tensors"]) > 3 * rows.bytes

"""`blockrelay plan` of ONNX blocks that others made: every strategy, their own bytes, one line for every mistake."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import OnnxBlocksError
from blockrelay.host.cpu import machine_name
from blockrelay.planning.profile import BlockProfile, Hop, Profile
from blockrelay.protocol.plan import split_text
from blockrelay.settings import SchedulerSettings
from blockrelay_scheduler.__main__ import planned_by, serve
from blockrelay_scheduler.plan_command.__main__ import run
from blockrelay_scheduler.planning.strategies.registry import OURS
from tests.support.models.altered_blocks import altered, copied, unshaped
from tests.support.models.onnx_blocks_served import opened
from tests.support.models.reference_blocks import MASK, ReferenceModel, write_reference_blocks

MODEL = ReferenceModel(layers=4)
#: What the profile has measured; the files have others.
BYTES = {"CPU": 2000, "GPU": 1000}
HOP = Hop(seconds=1e-4, seconds_per_byte=1e-6)
#: Of a row behind each block but the last two: hidden, cos and sin; and of the mask for each token.
ROW_BYTES, TOKEN_BYTES = 2 * (MODEL.hidden + 2 * MODEL.head_dim), 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
    root = tmp_path_factory.mktemp("planned")
    return opened(write_reference_blocks(root / "my-blocks", MODEL), root / "cache", "--max-position", "256")


@pytest.fixture
def profile(folder: BlockFolder, tmp_path: Path) -> Path:
    """A millisecond for each block on a CPU, half of one on a GPU."""
    times = {
        name: BlockProfile(seconds={1: seconds}, bytes=BYTES[name]) for name, seconds in (("CPU", 1e-3), ("GPU", 5e-4))
    }
    path = tmp_path / "profile.json"
    path.write_text(
        Profile(
            model=folder.model.name, model_hash=folder.manifest.model_hash, machine=machine_name(1), measured="t",
            blocks={block.name: times for block in folder.manifest.blocks}, hop={"redis": HOP},
        ).encode()
    )  # fmt: skip
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Any:
    assert run([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("strategy", sorted(OURS))
def test_every_strategy_plans_them(
    capsys: pytest.CaptureFixture[str], folder: BlockFolder, profile: Path, tmp_path: Path, strategy: str
) -> None:
    devices = tmp_path / "devices.json"
    both = [{"id": f"{name.lower()}:0", "class": name, "memory_bytes": 10**9} for name in BYTES]
    devices.write_text(json.dumps({"devices": both}))
    options = ["--strategy", strategy, "--profile", profile, "--devices", devices]
    options += ["--boundaries", "1-2,3-5"] if strategy == "custom" else []
    found = said(capsys, "--model", folder.root, *options)
    assert set(found["plan"]) == {f"block_{n}" for n in range(1, 6)} and found["estimated"] == []
    token = 2 * 2 * MODEL.kv_heads * MODEL.head_dim
    for stage in found["stages"]:
        first, last = map(int, stage["blocks"].split("-"))
        assert stage["bytes"] == (last - first + 1) * BYTES[stage["class"]], "as measured on the class"
        assert stage["kv_bytes"] == (min(last, 4) - first + 1) * token * 16 * 256, "16 requests of 256 tokens"
    if strategy not in ("auto", "ring-speed"):
        assert len(found["stages"]) == 2


def test_hops_take_what_travels_by_name(capsys: pytest.CaptureFixture[str], folder: BlockFolder, profile: Path) -> None:
    def hop(boundaries: str) -> float:
        options = ["--strategy", "custom", "--boundaries", boundaries, "--profile", profile]
        return said(capsys, "--model", folder.root, *options)["predicted_hop_seconds"]["1"]

    there_and_back = 2 * HOP.seconds
    row = ROW_BYTES + 128 * TOKEN_BYTES  # half of the promised context is what rows attend to
    assert hop("1-2,3-5") == pytest.approx(there_and_back + row * HOP.seconds_per_byte)
    assert hop("1-4,5-5") == pytest.approx(there_and_back + 2 * MODEL.hidden * HOP.seconds_per_byte)


def test_the_folder_itself_is_planned_with_the_source_s_profile(
    capsys: pytest.CaptureFixture[str], folder: BlockFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKRELAY_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "profiling_results.json"
    source.write_text(json.dumps({f"block_{n}": {"CPU": 0.2, "GPU": 0.1} for n in range(1, 6)}))
    assert folder.onnx_root is not None
    found = said(capsys, "--blocks", folder.onnx_root, "--strategy", "static-split", "--profile", source)
    assert found["k"] == 1 and found["pipeline_time"] == pytest.approx(0.4)
    assert [found["plan"][f"block_{n}"] for n in range(1, 6)] == ["CPU"] + 4 * ["GPU"]
    cpu, gpu = (stage["bytes"] for stage in found["stages"])
    files = [(folder.onnx_root / f"block_{n}.onnx").stat().st_size for n in range(1, 6)]
    assert (cpu, gpu) == (2 * files[0], sum(files[1:])), "ONNX Runtime has float16 in float32 on a CPU"


def test_a_scheduler_publishes_their_plan(folder: BlockFolder, profile: Path, tmp_path: Path) -> None:
    settings = SchedulerSettings(model=folder.root, strategy="static-split", profile=profile)
    planned = planned_by(settings, folder.model.blocks)
    assert (split_text(planned.stages), planned.classes) == ("1-1,2-5", ("CPU", "GPU"))
    alternating = tmp_path / "plan.json"
    alternating.write_text(json.dumps({f"block_{n}": "GPU" if n % 2 else "CPU" for n in range(1, 6)}))
    planned = planned_by(SchedulerSettings(model=folder.root, plan=alternating), folder.model.blocks)
    assert planned.for_gpus == (True, False, True, False, True)


def test_they_are_cut_only_where_everything_can_be_handed_on(
    capsys: pytest.CaptureFixture[str], folder: BlockFolder, tmp_path: Path
) -> None:
    """A mask of which nothing tells how many dimensions it has: the last stage takes none."""
    assert folder.onnx_root is not None
    dynamic = copied(folder.onnx_root, tmp_path / "b", altered("block_1.onnx", lambda model: unshaped(model, MASK, 4)))
    served = opened(dynamic, tmp_path / "cache").root
    custom = ["--model", str(served), "--strategy", "custom", "--boundaries"]
    assert len(said(capsys, *custom, "1-4,5-5")["stages"]) == 2
    assert run([*custom, "1-2,3-5"]) == 2
    shown = capsys.readouterr()
    assert f"block_1.onnx: {MASK}: is of unknown dimensions (a dynamic rank), and would travel" in shown.err
    (tmp_path / "plan.json").write_text(json.dumps({f"block_{n}": "GPU" if n > 2 else "CPU" for n in range(1, 6)}))
    with pytest.raises(OnnxBlocksError, match="dynamic rank"):
        serve(SchedulerSettings(model=served, plan=tmp_path / "plan.json"), threading.Event())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--blocks", "x", "--model", "y"], "--blocks is instead of --model"),
        (["--max-position", "8"], "--max-position is for --blocks"),
        (["--blocks", "nowhere"], "nowhere: there is no such folder"),
        (["--model", "MODEL", "--precision", "w8a8"], "my-blocks is ONNX blocks as they are, which have their own"),
        (["--model", "MODEL", "--profile", "33"], "it has 33 blocks, the model my-blocks has 5, which has no block_6"),
        (["--model", "MODEL", "--profile", "4"], "it has 4 blocks, the model my-blocks has 5, and block_5 is not in"),
        (["--model", "MODEL", "--profile", "other"], "measured with another model (other, 123)"),
        (["--model", "MODEL", "--strategy", "uniform", "--parts", "6"], "6 parts of 5 blocks"),
        (
            ["--model", "MODEL", "--strategy", "uniform", "--targets", ",".join(6 * ["cpu:0"])],
            "6 devices for 5 blocks: each device needs one",
        ),
        (["--model", "MODEL", "--strategy", "uniform", "--memory-limit", "1kB"], "above the limit of a part"),
    ],
)
def test_a_mistake_is_one_line(
    capfd: pytest.CaptureFixture[str],
    folder: BlockFolder,
    profile: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    line: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for count in (4, 33):
        blocks = {f"block_{n}": {"CPU": 0.2} for n in range(1, count + 1)}
        (tmp_path / str(count)).write_text(json.dumps(blocks))
    (tmp_path / "other").write_text(profile.read_text().replace(folder.manifest.model_hash, "123").replace(
        '"my-blocks"', '"other"'
    ))  # fmt: skip
    assert run([str(folder.root) if one == "MODEL" else one for one in arguments]) == 2
    shown = capfd.readouterr()
    assert line in shown.err and shown.err.count("\n") == 1 and shown.out == ""

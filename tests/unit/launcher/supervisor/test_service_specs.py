"""The settings that `up` gives to its gateways and GPU workers."""

from pathlib import Path

import pytest

from blockrelay.protocol.planned_split import parse_planned
from blockrelay_launcher.onnx_blocks.describe import DescribedBlocks
from blockrelay_launcher.supervisor.service_specs import ServiceLayout, gateways, schedulers, workers
from blockrelay_launcher.up_options.device_binding import HostGpu, bind
from blockrelay_launcher.up_options.groups import LimitOptions, NetworkOptions, TopologyOptions
from blockrelay_launcher.up_options.options import UpOptions


def layout_of(tmp_path: Path, options: UpOptions, count: int) -> ServiceLayout:
    return ServiceLayout(
        options=options,
        control_url="unix:///none",
        payload_url=None,
        data=tmp_path,
        ports=tuple(range(8000, 8000 + count)),
    )


def origins(tmp_path: Path, count: int, **options: str) -> list[set[str]]:
    network = NetworkOptions(**options)  # pyright: ignore[reportArgumentType]
    layout = layout_of(tmp_path, UpOptions(model=tmp_path, network=network), count)
    return [set(child.env["BLOCKRELAY_CORS_ORIGINS"].split(",")) for child in gateways(layout)]


def test_pages_of_one_gateway_may_use_the_others(tmp_path: Path) -> None:
    hosts = {"http://127.0.0.1:8000", "http://localhost:8000", "http://127.0.0.1:8001", "http://localhost:8001"}
    assert origins(tmp_path, 2) == [hosts, hosts]
    assert origins(tmp_path, 2, cors_origins="https://a.example")[0] == hosts | {"https://a.example"}
    assert "http://[::1]:8001" in origins(tmp_path, 2, host="::")[0]


def test_one_alone_knows_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert origins(tmp_path, 1) == [{""}]
    monkeypatch.setenv("BLOCKRELAY_CORS_ORIGINS", "https://b.example")
    assert origins(tmp_path, 1) == [{"https://b.example"}]
    assert origins(tmp_path, 1, cors_origins="https://a.example") == [{"https://a.example"}]


def test_a_gpu_has_one_process_for_all_its_stages_and_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKRELAY_GPU", "webgpu:0")  # of a worker that somebody starts
    gpus = tuple(HostGpu(id=name, device=name) for name in ("cuda:0", "cuda:1"))
    options = UpOptions(
        model=tmp_path, topology=TopologyOptions(stages=3), gpus=gpus, limits=LimitOptions(gpu_memory=3000)
    )
    children = workers(layout_of(tmp_path, options, 1))
    assert [child.name for child in children[3:]] == ["gpu-worker-cuda-0", "gpu-worker-cuda-1"]
    given = [(child.env.get("BLOCKRELAY_GPU_STAGES"), child.env.get("BLOCKRELAY_GPU_MEMORY")) for child in children]
    assert given == [(None, None)] * 3 + [("3", "3000")] * 2
    assert [child.env.get("BLOCKRELAY_GPU") for child in children] == [None] * 3 + ["cuda:0", "cuda:1"]
    kv_bytes = [int(child.env["BLOCKRELAY_KV_BYTES"]) for child in children]
    assert kv_bytes == [kv_bytes[0]] * 3 + [3 * kv_bytes[0]] * 2, "each stage has its share of the host's memory"


def test_stages_of_onnx_blocks_share_a_process_on_the_cpu_too(tmp_path: Path) -> None:
    """ONNX Runtime has their sessions, within one budget; each replica is a process."""
    served = DescribedBlocks(folder=tmp_path, model=tmp_path)
    gpus = (HostGpu(id="webgpu:0", device="webgpu:0"),)
    plan = parse_planned(
        '{"block_1": "GPU", "block_2": "CPU", "block_3": "GPU", "block_4": "CPU", "block_5": "CPU"}', "plan"
    )
    planned = bind(plan, gpus, list).planned
    twice = TopologyOptions(replicas=2)
    options = UpOptions(model=tmp_path, blocks=served, planned=planned, gpus=gpus, topology=twice)
    children = workers(layout_of(tmp_path, options, 1))
    assert [child.name for child in children] == ["worker-1", "worker-2", "gpu-worker-webgpu-0"]
    assert [child.env["BLOCKRELAY_GPU_STAGES"] for child in children] == ["4", "4", "2"]
    kv_bytes = [int(child.env["BLOCKRELAY_KV_BYTES"]) for child in children]
    assert kv_bytes[0] == kv_bytes[1] == 2 * kv_bytes[2]
    whole = workers(layout_of(tmp_path, UpOptions(model=tmp_path, blocks=served, topology=twice), 1))
    assert [child.env.get("BLOCKRELAY_GPU_STAGES") for child in whole] == [None, None]


def test_only_gateways_listen_where_others_reach_them(tmp_path: Path) -> None:
    layout = layout_of(tmp_path, UpOptions(model=tmp_path, network=NetworkOptions(host="0.0.0.0")), 1)
    listens = {
        child.name: child.env["BLOCKRELAY_HOST"] for child in (*gateways(layout), *schedulers(layout), *workers(layout))
    }
    assert listens == {"gateway": "0.0.0.0", "scheduler": "127.0.0.1", "worker-1": "127.0.0.1"}


def test_schedulers_know_the_profile_of_the_first_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    topology = TopologyOptions(strategy="optimal", profile=Path("profile.json"))
    (scheduler,) = schedulers(layout_of(tmp_path, UpOptions(model=tmp_path, topology=topology), 1))
    assert scheduler.env["BLOCKRELAY_PROFILE"] == str(tmp_path / "profile.json")
    (without,) = schedulers(layout_of(tmp_path, UpOptions(model=tmp_path), 1))
    assert "BLOCKRELAY_PROFILE" not in without.env


def test_the_password_of_another_redis_is_for_no_service_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell may reach another cell. The embedded Redis has no password, and that of --redis is in its address."""
    for name in ("REDIS_URL", "REDIS_PASSWORD_FILE", "PAYLOAD_REDIS_PASSWORD_FILE"):
        monkeypatch.setenv(f"BLOCKRELAY_{name}", "redis://there" if name.endswith("URL") else "/etc/there")
    (gateway,) = gateways(layout_of(tmp_path, UpOptions(model=tmp_path), 1))
    assert not {"/etc/there", "redis://there"} & set(gateway.env.values())

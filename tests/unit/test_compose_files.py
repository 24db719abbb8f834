"""compose.yaml and what may be added to it: services read every setting that it passes on."""

import re
import tomllib
from typing import Any

import pytest
import yaml

from blockrelay.settings import GatewaySettings, SchedulerSettings, Settings, WorkerSettings
from blockrelay_gateway.policy import LAST_WORDS_S
from tests.support.project import ROOT

SETTINGS: dict[str, type[Settings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
    "worker-gpu": WorkerSettings,
    "worker-webgpu": WorkerSettings,
}
COMPOSE = ROOT / "compose.yaml"
ADDITIONS = sorted((ROOT / "deploy" / "compose").glob("*.yaml"))
#: Fields of schedulers that say how the model is cut.
PLAN_FIELDS = ("plan", "strategy", "objective", "profile", "devices", "stage_devices")


def services(file: Any) -> dict[str, Any]:
    return yaml.safe_load(file.read_text())["services"]


@pytest.mark.parametrize("file", [COMPOSE, *ADDITIONS], ids=lambda file: file.name)
def test_every_setting_is_one_of_the_service_that_gets_it(file: Any) -> None:
    for name, service in services(file).items():
        if "observability" in service.get("profiles", ()):
            continue  # programs of others
        for variable in service.get("environment", {}):
            if name == "gateway" and variable.startswith("OTEL_"):
                assert f"`{variable}`" in (ROOT / "docs" / "observability.md").read_text()
                continue
            field = variable.removeprefix("BLOCKRELAY_").lower()
            assert variable.startswith("BLOCKRELAY_") and field in SETTINGS[name].model_fields, f"{name}: {variable}"


def test_what_is_not_set_outside_is_not_set_inside() -> None:
    """An empty value is one: `BLOCKRELAY_PLAN=` names no file."""
    environment = services(COMPOSE)["scheduler"]["environment"]
    for field in PLAN_FIELDS:
        variable = f"BLOCKRELAY_{field.upper()}"
        assert variable in environment and environment[variable] is None


@pytest.mark.parametrize("file", ADDITIONS, ids=lambda file: file.name)
def test_an_addition_changes_services_that_are_there_and_is_explained(file: Any) -> None:
    assert services(file).keys() <= services(COMPOSE).keys()
    assert f"deploy/compose/{file.name}" in COMPOSE.read_text()
    for variable in re.findall(r"\$\{(\w+):\?", file.read_text()):
        assert f"{variable}=" in COMPOSE.read_text()


@pytest.mark.parametrize(("service", "profile"), [("worker-gpu", "gpu"), ("worker-webgpu", "webgpu")])
def test_a_gpu_worker_takes_its_gpu_and_comes_only_when_asked_for(service: str, profile: str) -> None:
    worker, other = services(COMPOSE)[service], services(COMPOSE)["worker"]
    assert worker["profiles"] == [profile]
    if profile == "gpu":
        (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    else:
        assert worker["devices"] == ["${GPU_DEVICE:-/dev/dri}:/dev/dri"]
    assert worker["environment"]["BLOCKRELAY_DEVICE"] == "gpu"
    confined = ("read_only", "cap_drop", "security_opt", "networks", "restart", "stop_grace_period")
    assert [worker[name] for name in confined] == [other[name] for name in confined]


PAGE_STORE = "BLOCKRELAY_PAGE_STORE_REDIS_BYTES"


def test_gpu_workers_leave_their_pages_where_cpu_workers_look_for_them() -> None:
    """Without a shared page store a CPU that goes on for a failed GPU computes the whole prompt again."""
    workers = {name: one for name, one in services(COMPOSE).items() if name.startswith("worker")}
    assert len({service["environment"][PAGE_STORE] for service in workers.values()}) == 1
    stores: list[str] = []
    for file in ("base/worker-cpu.yaml", "components/worker-gpu/worker-gpu.yaml"):
        (deployment,) = (
            one
            for one in yaml.safe_load_all((ROOT / "deploy" / "k8s" / file).read_text())
            if one["kind"] == "Deployment"
        )
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        stores += [one["value"] for one in container["env"] if one["name"] == PAGE_STORE]
    assert len(stores) == 2 and len(set(stores)) == 1 and int(stores[0]) > 0


@pytest.mark.parametrize("target", ["worker-cuda", "worker-webgpu"])
def test_an_image_for_gpus_installs_its_extra_and_computes_there(target: str) -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    extra = target.removeprefix("worker-")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extra in extras and f'install-service "[structured,{extra}]"' in text
    stage = text.partition(f"FROM runtime AS {target}\n")[2].partition("\nFROM ")[0]
    assert f"COPY --from={target}-packages " in stage and f"BLOCKRELAY_GPU={extra}:0" in stage
    assert "BLOCKRELAY_DEVICE=gpu" in stage and 'CMD ["python", "-m", "blockrelay_worker"]' in stage
    users = re.findall(r"^USER (\S+)", stage, re.M)
    assert not users or users[-1] == "10001:10001", "it does not run as root"


def test_no_stage_for_gpus_stands_above_a_target_for_cpus() -> None:
    """The builder before BuildKit builds every stage from the first to the target."""
    stages = re.split(r"^FROM ", (ROOT / "deploy" / "Dockerfile").read_text(), flags=re.M)[1:]
    names = [stage.split()[2] for stage in stages]
    gpu = [
        n for n, stage in zip(names, stages, strict=True) if re.search(r",cuda\]|,webgpu\]|vulkan|DEVICE=gpu", stage)
    ]
    assert {"worker-cuda", "worker-cuda-packages", "worker-webgpu", "worker-webgpu-packages"} == set(gpu)
    targets = {one["build"]["target"] for one in services(COMPOSE).values() if "build" in one}
    assert targets - set(gpu) == {"gateway", "scheduler", "worker", "converter"}
    for target in targets - set(gpu):
        assert not set(names[: names.index(target)]) & set(gpu), f"{target} takes gigabytes that it does not need"
    webgpu = names[: names.index("worker-webgpu")]
    assert "worker-cuda-packages" not in webgpu, "an image for AMD and Intel needs nothing of NVIDIA's"


def test_a_gateway_that_is_stopped_has_the_time_that_it_takes() -> None:
    gateway = services(COMPOSE)["gateway"]
    drain, linger = (
        re.fullmatch(rf"\$\{{{name}:-(\d+)\}}", gateway["environment"][name])
        for name in ("BLOCKRELAY_GATEWAY_DRAIN_S", "BLOCKRELAY_GATEWAY_LINGER_S")
    )
    assert drain and linger and 0 < int(linger[1]) <= int(drain[1])
    assert int(gateway["stop_grace_period"].removesuffix("s")) >= int(drain[1]) + LAST_WORDS_S

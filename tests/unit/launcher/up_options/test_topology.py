"""The file of `up --topology`: what each host starts, and what is wrong in which line."""

import json
from pathlib import Path

import pytest

from blockrelay.errors import UsageError
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_launcher.up_options.groups import NetworkOptions
from blockrelay_launcher.up_options.options import UpOptions, service_names, worker_specs
from blockrelay_launcher.up_options.topology import options_for, read_topology

pytestmark = pytest.mark.thorough

TWO_HOSTS = """\
strategy: custom
boundaries: 1-2,3-5,6-7
targets: cpu:a,gpu0,cpu:a
redis: redis://10.0.0.1:6379/0
hosts:
  a:
    roles: [scheduler, gateway, worker]
    listen: 0.0.0.0
    port: 8080
    devices:
      - {id: "cpu:a", memory: 8GB, threads: 3, bytes_per_second: 20GB/s}
  b:
    model: models/b
    devices:
      - id: gpu0
        class: GPU
        memory: 24000000000
        bytes_per_second: 900GB/s
        operations_per_second: 80T/s
        gpu: webgpu:0
links:
  - {between: [a, b], seconds: 0.0002, seconds_per_byte: 1.0e-9}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "topology.yaml"
    path.write_text(text)
    return path


def options(path: Path, host: str | None, *, port: int = 8000) -> UpOptions:
    network = NetworkOptions(host=host, port=port)
    return options_for(read_topology(path), UpOptions(model=BUNDLED_MODEL, network=network))


def test_each_host_starts_its_own_part_of_one_plan(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/b").symlink_to(BUNDLED_MODEL)
    path = written(tmp_path, TWO_HOSTS)
    a, b = options(path, "a"), options(path, "b")
    assert a.planned == b.planned and a.planned is not None and a.planned.text == "1-2,3-5,6-7"
    assert service_names(a) == ["scheduler", "worker-1", "worker-2", "gateway"]
    assert [(w.device_id, w.gpu, w.threads) for w in worker_specs(a)] == [("cpu:a", "", 3)] * 2
    assert (a.network.host, a.network.port, a.model) == ("0.0.0.0", 8080, BUNDLED_MODEL)
    assert a.network.redis == "redis://10.0.0.1:6379/0"
    assert a.planned.devices == (("cpu:a",), ("gpu0", "cpu:*"), ("cpu:a",)) and a.planned.for_gpus == (
        False,
        True,
        False,
    )
    assert service_names(b) == ["worker-1", "gpu-worker-webgpu-0"], "a CPU stands in"
    stand_in, on_gpu = worker_specs(b)
    assert (stand_in.device, stand_in.device_id) == ("cpu", "")
    assert (on_gpu.device, on_gpu.device_id, on_gpu.gpu, on_gpu.stages) == ("gpu", "gpu0", "webgpu:0", 1)
    assert (b.topology.gateways, b.topology.schedulers, b.model) == (0, 0, tmp_path / "models/b")


def test_a_plan_by_classes_is_for_all_devices_of_each(tmp_path: Path) -> None:
    classes = {f"block_{number}": "GPU" if number > 3 else "CPU" for number in range(1, 8)}
    (tmp_path / "plan.json").write_text(json.dumps(classes))
    text = "plan: plan.json\n" + TWO_HOSTS.partition("targets: cpu:a,gpu0,cpu:a\n")[2]
    planned = options(written(tmp_path, text), "a").planned
    assert planned is not None and planned.devices == (("cpu:a",), ("gpu0", "cpu:*"))
    alone = text.replace("class: GPU", "class: big").replace("        gpu: webgpu:0\n", "")
    with pytest.raises(UsageError, match=r"plan: it is for gpu:\*, and no host of the topology has one"):
        options(written(tmp_path, alone), "a")


@pytest.mark.parametrize("device", ["cuda:1", "GPU-8f2a", "cpu"])
def test_an_id_that_is_a_device_needs_no_other_name(tmp_path: Path, device: str) -> None:
    text = TWO_HOSTS.replace("        gpu: webgpu:0\n", "").replace("id: gpu0", f"id: {device}")
    b = options(
        written(tmp_path, text.replace("cpu:a,gpu0", f"cpu:a,{device}").replace("    model: models/b\n", "")), "b"
    )
    assert [spec.gpu for spec in worker_specs(b)] == ["", device]


def test_one_part_is_a_wish_too(tmp_path: Path) -> None:
    of_two = TWO_HOSTS.replace("custom\nboundaries: 1-2,3-5,6-7\ntargets: cpu:a,gpu0,cpu:a", "uniform\nparts: 1")
    planned = options(written(tmp_path, of_two), "a").planned
    assert planned is not None and planned.text == "1-7"


def test_a_host_without_the_role_starts_no_worker(tmp_path: Path) -> None:
    path = written(tmp_path, TWO_HOSTS.replace("[scheduler, gateway, worker]", "[gateway]"))
    assert service_names(options(path, "a")) == ["gateway"]


def test_one_host_alone_needs_no_name_and_no_redis(tmp_path: Path) -> None:
    text = (
        "hosts:\n  here:\n    roles: [scheduler, gateway, worker]\n    devices: [{id: cpu, bytes_per_second: 2e10}]\n"
    )
    alone = options(written(tmp_path, text), None, port=0)
    assert alone.network.redis is None and alone.network.port == 0 and service_names(alone)[1] == "worker-1"


@pytest.mark.parametrize(("host", "said"), [(None, "--host a or b"), ("c", "no host c: there is a, b")])
def test_a_host_that_is_not_there_is_said(tmp_path: Path, host: str | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        options(written(tmp_path, TWO_HOSTS), host)


def test_a_plan_for_a_device_that_no_host_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"stages": [{"blocks": "1-7", "devices": ["gpu7"]}]}')
    text = "plan: plan.json\n" + TWO_HOSTS.partition("targets: cpu:a,gpu0,cpu:a\n")[2]
    with pytest.raises(UsageError, match=r"line 2: targets: --targets is for --strategy"):
        options(written(tmp_path, text.replace("redis:", "targets: gpu0\nredis:", 1)), "a")
    with pytest.raises(UsageError, match="for device gpu7, which no host"):
        options(written(tmp_path, text), "a")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        pytest.param("port: 8080", "port: 80800", "line 9: hosts.a.port: Input should be less", id="a value"),
        pytest.param("listen:", "lisen:", "line 8: hosts.a.lisen: Extra inputs are not permitted", id="a name"),
        pytest.param("class: GPU", "class: 'G P U'", "line 16: hosts.b.devices.0.class: String", id="deep inside"),
        pytest.param("threads: 3", "threads: none", "line 11: hosts.a.devices.0.threads: Input", id="in one line"),
        pytest.param(
            "id: gpu0", "id: cpu:a", "line 15: hosts.b.devices.0: device cpu:a is there twice", id="a device twice"
        ),
        pytest.param("[a, b]", "[a, c]", "line 22: links.0.between: there is no host c", id="an unknown host"),
        pytest.param("  b:\n", "  a:\n", "line 12: a is there twice", id="a host twice"),
        pytest.param("80T/s", "80 much", "line 15: hosts.b.devices.0: operations_per_second: '80 much'", id="a unit"),
        pytest.param("redis: redis://10.0.0.1:6379/0\n", "", "several hosts need a Redis", id="no Redis"),
        pytest.param(
            "strategy: custom", "strategy: custom\nplan: p", "line 2: plan: plan and strategy", id="two plans"
        ),
        pytest.param("worker]", "worker", "line ", id="no YAML"),
        pytest.param("[a, b]", "&x [a, *x]", "line 22: aliases", id="an alias"),
        pytest.param("gpu0,cpu:a", "gpu0,cpu:z", "line 3: targets: strategy custom: there is no", id="a target"),
        pytest.param("3-5,6-7", "3-5,5-7", "line 2: boundaries: strategy custom: bound", id="an overlap"),
        pytest.param("custom", "magic", "line 1: strategy: strategy magic: there is no strategy", id="a strategy"),
        pytest.param("custom", "auto", "line 2: boundaries: strategy auto does not go by bound", id="a wish"),
        pytest.param("memory: 8GB", "memory: -8", "line 11: hosts.a.devices.0.memory: Input", id="a number"),
        pytest.param("memory: 8GB", "memory: 8 Hz", "hosts.a.devices.0: memory: '8 Hz'", id="memory's unit"),
        pytest.param("memory: 8GB", "memory: .inf", "hosts.a.devices.0.memory: ", id="too much"),
        pytest.param("memory: 8GB", "memory: 1e400", "hosts.a.devices.0: memory: 1e400 must", id="too much as text"),
        pytest.param("memory: 8GB", "memory: 0GB", "hosts.a.devices.0: memory: 0GB must be above 0", id="none"),
        pytest.param("memory: 8GB", "speed: .nan", "hosts.a.devices.0.speed: ", id="no number"),
        pytest.param("port: 8080", "port: 2024-13-45", "not YAML", id="no date"),
        pytest.param("[a, b]", "[a, a]", "line 21: links: ", id="a link to itself"),
        pytest.param("custom", "auto\nparts: 1", "line 2: parts: strategy auto does not go by parts", id="parts"),
        pytest.param(
            "        gpu: webgpu:0\n",
            "",
            "line 15: hosts.b.devices.0: device gpu0 is of class GPU, and nothing says which",
            id="no real device",
        ),
        pytest.param(
            "class: GPU",
            "class: CPU",
            "line 15: hosts.b.devices.0: device gpu0 is gpu webgpu:0, and of class CPU",
            id="a GPU that is a CPU",
        ),
        pytest.param("hosts:", "guests:", "line 1: hosts: Field required", id="nothing"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_its_place(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in TWO_HOSTS
    path = written(tmp_path, TWO_HOSTS.replace(old, new, 1))
    with pytest.raises(UsageError) as raised:
        options(path, "a")
    assert said in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("content", ["", "7", "[]", "\x00", "a: [", "? {a: b}\n: c", "hosts: {a: {}}"])
def test_a_file_that_is_no_topology_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(UsageError, match=r"topology\.yaml"):
        options(written(tmp_path, content), None)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing: No such file"):
        read_topology(tmp_path / "nothing")

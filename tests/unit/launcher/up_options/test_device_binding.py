"""Which devices of a host a plan's are, and the workers that follow."""

from pathlib import Path

import pytest

from blockrelay.errors import UsageError
from blockrelay.protocol.planned_split import PlannedSplit, equal_parts, parse_planned
from blockrelay_launcher.up_options.device_binding import Bound, HostGpu, bind
from blockrelay_launcher.up_options.groups import TopologyOptions
from blockrelay_launcher.up_options.options import UpOptions, WorkerSpec, worker_specs


def plan(*stages: str) -> PlannedSplit:
    """Of stages such as `GPU gpu:0 gpu:1`: one block each, a class (-: none) and ids."""
    entries: list[str] = []
    for number, stage in enumerate(stages, 1):
        told, *ids = stage.split()
        of_class = "" if told == "-" else f', "class": "{told}"'
        devices = ", ".join(f'"{one}"' for one in ids)
        entries.append(f'{{"blocks": "{number}-{number}", "devices": [{devices}]{of_class}}}')
    return parse_planned(f'{{"stages": [{", ".join(entries)}]}}', "a plan")


def gpus(*names: str) -> tuple[HostGpu, ...]:
    return tuple(HostGpu(id=name, device=name) for name in names)


def bound(planned: PlannedSplit, *named: str, here: tuple[str, ...] | None = None) -> Bound:
    """`here` None: nobody may ask what is here."""

    def look() -> tuple[HostGpu, ...]:
        assert here is not None, "it costs seconds, and is not needed"
        return gpus(*here)

    return bind(planned, gpus(*named), look)


def workers(found: Bound, *, replicas: int = 1) -> list[WorkerSpec]:
    topology = TopologyOptions(replicas=replicas)
    return worker_specs(UpOptions(model=Path("m"), planned=found.planned, gpus=found.gpus, topology=topology))


SPLIT = ("CPU cpu:0", "GPU gpu:0")


def test_a_class_is_the_device_that_was_named_and_a_cpu_stands_in() -> None:
    found = bound(plan(*SPLIT), "cpu")
    assert found.planned.devices == (("cpu:0",), ("cpu", "cpu:*")) and found.planned.classes == ("CPU", "GPU")
    assert found.planned.reasons == ("planned for cpu:0", "planned for gpu:0; gpu:0 is cpu")
    first, stand_in, on_gpu = workers(found)
    assert (first.device, first.device_id) == ("cpu", "cpu:0")
    assert (stand_in.device, stand_in.device_id) == ("cpu", "")
    assert on_gpu == WorkerSpec(name="gpu-worker-cpu", device="gpu", device_id="cpu", gpu="cpu", stages=1)


@pytest.mark.parametrize(
    ("stages", "named", "here", "devices", "used"),
    [
        pytest.param(
            SPLIT, [], ("webgpu:0", "webgpu:1"), [["cpu:0"], ["webgpu:0", "cpu:*"]], ["webgpu:0"], id="the first",
        ),
        pytest.param(SPLIT, ["cuda:1"], None, [["cpu:0"], ["cuda:1", "cpu:*"]], ["cuda:1"], id="the named one"),
        pytest.param(
            ["GPU gpu:1", "GPU gpu:0", "GPU gpu:1"], ["cuda:1", "cuda:0"], None,
            [["cuda:1", "cpu:*"], ["cuda:0", "cpu:*"], ["cuda:1", "cpu:*"]], ["cuda:1", "cuda:0"], id="in order",
        ),
        pytest.param(
            ["GPU gpu:0", "GPU cuda:0"], ["cuda:0", "cuda:1"], None,
            [["cuda:1", "cpu:*"], ["cuda:0", "cpu:*"]], ["cuda:0", "cuda:1"], id="by id before by class",
        ),
        pytest.param(["- cuda:1"], [], ("cuda:0", "cuda:1"), [["cuda:1", "cpu:*"]], ["cuda:1"], id="by id alone"),
        pytest.param(["- gpu0"], ["webgpu:0"], None, [["webgpu:0", "cpu:*"]], ["webgpu:0"], id="a class by the id"),
        pytest.param(["- cpu"], ["cpu"], None, [["cpu", "cpu:*"]], ["cpu"], id="cpu, as a device"),
        pytest.param(["- cpu", "- a"], [], None, [["cpu"], ["a"]], [], id="nothing for GPUs"),
        pytest.param(
            ["CPU cpu", "GPU gpu0"], ["cpu"], None, [["cpu"], ["cpu", "cpu:*"]], ["cpu"], id="both called cpu",
        ),
        pytest.param(["GPU gpu:* cpu:*"], ["cpu"], None, [["gpu:*", "cpu:*"]], ["cpu"], id="any"),
        pytest.param(["GPU gpu:* cpu:*"], [], None, [["gpu:*", "cpu:*"]], [], id="any, from elsewhere"),
        pytest.param(
            ["GPU gpu:0 gpu:1"], ["cuda:0", "cuda:1"], None, [["cuda:0", "cuda:1", "cpu:*"]], ["cuda:0", "cuda:1"],
            id="replicas",
        ),
    ],
)  # fmt: skip
def test_devices_are_found_by_id_and_by_class(
    stages: list[str], named: list[str], here: tuple[str, ...] | None, devices: list[list[str]], used: list[str]
) -> None:
    found = bound(plan(*stages), *named, here=here)
    assert [list(ids) for ids in found.planned.devices] == devices
    assert [gpu.id for gpu in found.gpus] == used
    again = bound(found.planned, *used)
    assert again.planned == found.planned, "it is bound"


def test_a_uuid_is_the_device_that_it_is_of() -> None:
    card = HostGpu(id="cuda:1", device="GPU-8f12")
    found = bind(plan("GPU GPU-8f12", "GPU cuda:1"), [card], tuple)
    assert found.planned.devices == (("cuda:1", "cpu:*"),) * 2
    (*_, on_gpu) = workers(found)
    assert (on_gpu.gpu, on_gpu.device_id, on_gpu.stages) == ("GPU-8f12", "cuda:1", 2)


def test_each_gpu_has_a_worker_for_each_stage_of_its_own() -> None:
    found = bound(plan("GPU gpu:0", "CPU cpu:0", "GPU gpu:* cpu:*", "GPU gpu:0 gpu:1"), "cuda:0", "cuda:1")
    assert [(spec.gpu, spec.stages) for spec in workers(found) if spec.gpu] == [("cuda:0", 3), ("cuda:1", 2)]
    names = [(spec.name, spec.device_id) for spec in workers(found, replicas=2) if not spec.gpu]
    assert names == [(f"worker-{n}", "cpu:0" if n in (3, 4) else "") for n in range(1, 9)]


def test_a_model_in_equal_parts_has_every_gpu_at_every_stage() -> None:
    found = bound(equal_parts(4, 2), "cpu", "webgpu:0")
    assert found.planned == equal_parts(4, 2)
    assert [(spec.gpu, spec.stages) for spec in workers(found)] == [("", 1), ("", 1), ("cpu", 2), ("webgpu:0", 2)]


@pytest.mark.parametrize(
    ("stages", "named", "here", "said"),
    [
        (SPLIT, [], (), "the plan is for gpu:0, and here is no GPU; see "),
        (["GPU a", "GPU b"], [], ("cuda:0",), "the plan is for b, and here is no other GPU (a is cuda:0)"),
        (["GPU a", "GPU b"], ["cpu"], None, "the plan is for b, and --gpu names no further device for it: a is cpu"),
        (["GPU webgpu:3"], ["webgpu:0"], None, "the plan is for webgpu:3, and --gpu names webgpu:0"),
        (["- cuda:3"], [], ("cuda:0",), "the plan is for cuda:3: no such device here, but cuda:0"),
        (["GPU cuda:3"], [], (), "the plan is for cuda:3: no such device here, nor another GPU"),
        (["CPU cpu:0"], ["cpu"], None, "--gpu cpu: no block of the plan uses it; its devices are cpu:0"),
        (SPLIT, ["cuda:0", "cuda:1"], None, "--gpu cuda:1: no block of the plan uses it; its devices are cpu:0, gpu:0"),
        (["CPU cpu:*"], ["cuda:0"], None, "--gpu cuda:0: no block of the plan uses it"),
    ],
)
def test_what_is_not_there_and_what_nothing_uses_is_one_line(
    stages: list[str], named: list[str], here: tuple[str, ...] | None, said: str
) -> None:
    with pytest.raises(UsageError) as raised:
        bound(plan(*stages), *named, here=here)
    assert said in str(raised.value) and "\n" not in str(raised.value)

"""The options of `blockrelay up`, and the services that follow from them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from blockrelay.protocol.plan import CPU, GPU, Device
from blockrelay.protocol.planned_split import ANY_CPU, ANY_GPU, PlannedSplit
from blockrelay_launcher.onnx_blocks.describe import DescribedBlocks, served_blocks
from blockrelay_launcher.up_options.device_binding import HostGpu
from blockrelay_launcher.up_options.gpu_choice import first_gpus, named_gpus
from blockrelay_launcher.up_options.groups import (
    AdvancedOptions,
    DeviceOptions,
    LimitOptions,
    NetworkOptions,
    ServedModelOptions,
    TopologyOptions,
)

#: Prefix of the names of workers on GPUs.
GPU_WORKER = "gpu-worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What `blockrelay up` starts: its groups of options, and what was found for them on this host."""

    model: Path
    """The block folder."""
    other_precisions: tuple[Path, ...] = ()
    """Folders of the same checkpoint in other precisions."""
    degrade: bool = False
    """Whether the system changes to a smaller one of them where memory lacks."""
    draft_model: Path | None = None
    """The block folder of the draft model."""
    blocks: DescribedBlocks | None = None
    """Set if the model is ONNX blocks that are served as they are."""
    planned: PlannedSplit | None = None
    """The first plan, once it was read."""
    local: Mapping[str, int | None] | None = None
    """The threads of each device of this host (None: a fair share of the cores), by its id in the plan.

    None: all devices that the plan names are here.
    """
    gpus: tuple[HostGpu, ...] = ()
    """GPUs that each get a process, with a worker for every stage that may run there."""
    topology: TopologyOptions = field(default_factory=TopologyOptions)
    limits: LimitOptions = field(default_factory=LimitOptions)
    network: NetworkOptions = field(default_factory=NetworkOptions)
    advanced: AdvancedOptions = field(default_factory=AdvancedOptions)


def composed(
    model: ServedModelOptions,
    devices: DeviceOptions,
    topology: TopologyOptions,
    limits: LimitOptions,
    network: NetworkOptions,
    advanced: AdvancedOptions,
) -> UpOptions:
    """Returns the options of `up` with the GPUs and ONNX blocks that they name. A topology file is not read here.

    Raises UsageError for GPUs that do not exist and for options of ONNX blocks that do not go together. Raises
    typer.Exit if the worker has printed an error of the blocks, WireError if its report cannot be read.
    """
    gpus = first_gpus(devices.gpu_workers) if devices.gpu_workers else named_gpus(devices.named)
    blocks = served_blocks(model, gpus=bool(gpus))
    return UpOptions(
        model=blocks.model if blocks else model.model,
        other_precisions=tuple(path.absolute() for path in model.other_precision or ()),
        degrade=model.degrade,
        draft_model=model.draft_model,
        blocks=blocks,
        gpus=gpus,
        topology=topology,
        limits=limits,
        network=network,
        advanced=advanced,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A process of workers that `up` starts."""

    name: str
    device: Device = CPU
    device_id: str = ""
    """Id of the device in the plan; empty: the plan names none."""
    threads: int | None = None
    """None: those of `--threads`, else a fair share of the cores."""
    gpu: str = ""
    """The GPU, such as webgpu:0; empty: CPU."""
    stages: int = 1
    """Number of workers in the process, each for a stage."""


def worker_specs(options: UpOptions) -> list[WorkerSpec]:
    """Returns the processes of workers that this host starts.

    Each stage gets `replicas` CPU workers, or one for each CPU that it names if these are more; on stages for GPUs they
    stand in. With a topology (`local`), a stage gets one for each CPU of this host that it names, and `replicas` more
    only if it names a GPU of this host. Each GPU that a stage may use gets one process.

    CPU workers have a process each, except for several stages of ONNX blocks: those share one process with ONNX Runtime
    and its warm sessions, as the stages of a GPU do.
    """
    stages = [_cpus(options, stage) for stage in range(len(_devices(options)))]
    if options.blocks is None or len(stages) == 1:
        processes = [(device, 1) for ids in stages for device in ids]
    else:
        shared = Counter((device, ids[:at].count(device)) for ids in stages for at, device in enumerate(ids))
        processes = [(device, count) for (device, _), count in shared.items()]
    specs = [
        WorkerSpec(name=f"worker-{number}", device_id=device, threads=_threads(options, device), stages=count)
        for number, (device, count) in enumerate(processes, 1)
    ]
    return [*specs, *_on_gpus(options)]


def _cpus(options: UpOptions, stage: int) -> list[str]:
    """Returns the device ids of the CPU workers of a stage; "" for a worker whose device the plan does not name."""
    ids = _devices(options)[stage]
    gpus = _gpus(options, stage)
    named = [device for device in ids if device not in (ANY_GPU, ANY_CPU) and device not in gpus]
    if options.local is None:
        return [named[n % len(named)] if named else "" for n in range(max(options.topology.replicas, len(named)))]
    # With several hosts, each starts CPU workers that stand in for its own GPUs.
    return [
        *(device for device in named if device in options.local),
        *([""] * options.topology.replicas if gpus else []),
    ]


def _devices(options: UpOptions) -> tuple[tuple[str, ...], ...]:
    return options.planned.devices if options.planned else ((),) * options.topology.stages


def _gpus(options: UpOptions, stage: int) -> list[str]:
    """Returns the ids of the GPUs of this host that a stage names."""
    if options.planned is None or not options.planned.for_gpus[stage]:
        return []
    return [gpu.id for gpu in options.gpus if gpu.id in options.planned.devices[stage]]


def _threads(options: UpOptions, device: str) -> int | None:
    return options.local.get(device) if options.local is not None else None


def _on_gpus(options: UpOptions) -> list[WorkerSpec]:
    """Returns a process for each GPU, with a worker for every stage that names this GPU, any GPU, or no device."""
    specs: list[WorkerSpec] = []
    for gpu in options.gpus:
        stages = sum(
            not ids or ANY_GPU in ids or gpu.id in _gpus(options, stage) for stage, ids in enumerate(_devices(options))
        )
        if stages:
            specs.append(
                WorkerSpec(
                    name=f"{GPU_WORKER}-{gpu.device.replace(':', '-')}",
                    device=GPU,
                    device_id=gpu.id,
                    gpu=gpu.device,
                    stages=stages,
                    threads=_threads(options, gpu.id),
                )
            )
    return specs


def service_names(options: UpOptions) -> list[str]:
    """Returns the names of all services but Redis, as `up` shows them and as their files in DATA/settings are named."""
    return [
        *names_of("scheduler", options.topology.schedulers),
        *(spec.name for spec in worker_specs(options)),
        *names_of("gateway", options.topology.gateways),
    ]


def names_of(role: str, count: int) -> list[str]:
    """Returns the names of `count` gateways or schedulers (`role`); a single one has no number."""
    return [role] if count == 1 else [f"{role}-{n}" for n in range(1, count + 1)]

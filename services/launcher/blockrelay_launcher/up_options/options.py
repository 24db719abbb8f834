"""The options of `blockrelay up`, and the services that follow from them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blockrelay.protocol.plan import Device
from blockrelay.protocol.planned_split import ANY_CPU, ANY_GPU, PlannedSplit
from blockrelay_launcher.onnx_blocks.describe import ServedBlocks
from blockrelay_launcher.supervisor.embedded_redis import Fsync
from blockrelay_launcher.up_options.device_binding import HostGpu
from blockrelay_launcher.up_options.plan_choice import ONE_STAGE, PlanChoice

#: How names of workers on GPUs begin.
GPU_WORKER = "gpu-worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDevice:
    """A device of this host that plans name. `gpu` is what it is, such as webgpu:0; "": a CPU. `threads` None: a fair
    share of the cores."""

    gpu: str = ""
    threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """The options of `blockrelay up`. `plan` says which plan it starts with, `planned` is that plan, once it was read.
    `local` are the devices of this host by their ids; None: all that the plan names. `port` 0 picks a free one;
    `threads` None shares the cores between the workers of one stage. Each of `gpus` has a process with a worker for
    every stage that is for it; together they may use `gpu_memory` bytes of it. `blocks`: the
    model is ONNX blocks as they are.

    Several `gateways` listen on as many consecutive ports from `port` on. `redis_url` None starts an embedded control
    and payload Redis; `fsync` is the control one's. `data`
    None keeps everything in a temporary folder that is removed at the end. `cors_origins`, `allowed_hosts` and
    `root_path` are the gateways' settings of these names.
    """

    model: Path
    plan: PlanChoice = ONE_STAGE
    planned: PlannedSplit | None = None
    local: Mapping[str, LocalDevice] | None = None
    replicas: int = 1
    gpus: tuple[HostGpu, ...] = ()
    gpu_memory: int | None = None
    blocks: ServedBlocks | None = None
    gateways: int = 1
    schedulers: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    redis_url: str | None = None
    payload_redis_url: str | None = None
    fsync: Fsync = "always"
    data: Path | None = None
    threads: int | None = None
    speculation: bool = True
    prefix_cache: bool = True
    page_store_bytes: int | None = None
    api_keys: Path | None = None
    cors_origins: str | None = None
    root_path: str | None = None
    allowed_hosts: str | None = None
    verbose: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A process that `up` starts, with a worker for each of so many `stages`: on the GPU `gpu`, or on CPUs. `device_id`
    "": no plan names its device."""

    name: str
    device: Device = "cpu"
    device_id: str = ""
    threads: int | None = None
    gpu: str = ""
    stages: int = 1


def worker_specs(options: UpOptions) -> list[WorkerSpec]:
    """For each stage `replicas` CPU workers, or one for each CPU that it names if these are more, as far as those are
    on this host: where it names GPUs they stand in. And for each GPU a process.

    CPU workers have a process each, but for stages of ONNX blocks as they are: those run in ONNX Runtime, and share its
    process and its warm sessions as the stages of a GPU do."""
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
    """The ids of the CPU workers of a stage, "" for those that no plan names."""
    ids = _devices(options)[stage]
    gpus = _gpus(options, stage)
    named = [device for device in ids if device not in (ANY_GPU, ANY_CPU) and device not in gpus]
    if options.local is None:
        return [named[n % len(named)] if named else "" for n in range(max(options.replicas, len(named)))]
    # Of several hosts each has the stand-ins of its own GPUs.
    return [*(device for device in named if device in options.local), *([""] * options.replicas if gpus else [])]


def _devices(options: UpOptions) -> tuple[tuple[str, ...], ...]:
    return options.planned.devices if options.planned else ((),) * options.plan.stages


def _gpus(options: UpOptions, stage: int) -> list[str]:
    """The GPUs of this host that a stage names."""
    if options.planned is None or not options.planned.for_gpus[stage]:
        return []
    return [gpu.id for gpu in options.gpus if gpu.id in options.planned.devices[stage]]


def _threads(options: UpOptions, device: str) -> int | None:
    return options.local[device].threads if options.local is not None and device in options.local else None


def _on_gpus(options: UpOptions) -> list[WorkerSpec]:
    """For each GPU a process, with a worker for every stage that names it, or any GPU, or nothing."""
    specs: list[WorkerSpec] = []
    for gpu in options.gpus:
        stages = sum(
            not ids or ANY_GPU in ids or gpu.id in _gpus(options, stage) for stage, ids in enumerate(_devices(options))
        )
        if stages:
            specs.append(
                WorkerSpec(
                    name=f"{GPU_WORKER}-{gpu.device.replace(':', '-')}",
                    device="gpu",
                    device_id=gpu.id,
                    gpu=gpu.device,
                    stages=stages,
                    threads=_threads(options, gpu.id),
                )
            )
    return specs


def service_names(options: UpOptions) -> list[str]:
    """Of all services, as `up` shows them and DATA/settings and DATA/logs name their files."""
    return [
        *names_of("scheduler", options.schedulers),
        *(spec.name for spec in worker_specs(options)),
        *names_of("gateway", options.gateways),
    ]


def names_of(role: str, count: int) -> list[str]:
    """The names of `count` gateways or schedulers."""
    return [role] if count == 1 else [f"{role}-{n}" for n in range(1, count + 1)]

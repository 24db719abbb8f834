"""Binds the GPUs that a plan names to the GPUs of this host: by id, then the others in order. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from blockrelay.errors import UsageError
from blockrelay.protocol.planned_split import ANY_CPU, ANY_GPU, PlannedSplit, is_gpu, is_host_device
from blockrelay.typed_command import typed


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGpu:
    """A GPU of this host."""

    id: str
    """Its id in plans, such as webgpu:0."""
    device: str
    """The value of `--gpu` of its worker: the id or a UUID."""
    problem: str = ""
    """Why it cannot be used now, although it exists; empty: it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A plan with the ids of real devices, and the GPUs that it uses, in the order of `--gpu` or of the host."""

    planned: PlannedSplit
    gpus: tuple[HostGpu, ...]


def bind(planned: PlannedSplit, named: Sequence[HostGpu], here: Callable[[], Sequence[HostGpu]]) -> Bound:
    """Returns the plan bound to GPUs of `named` (`--gpu`), or to those of this host if `named` is empty.

    A GPU of the plan gets the device with the same id; the others get the remaining devices in order. Stages with GPUs
    also allow CPUs, which stand in. `here` lists the GPUs of this host; it is called only if the plan has GPUs and
    `named` is empty. Raises UsageError for a device of the plan that is missing, and for a named one that no block
    uses.
    """
    wanted = _wanted(planned, named)
    pool = named if named or not wanted else here()
    bound: dict[str, HostGpu] = {}
    for device in wanted:
        same = [gpu for gpu in pool if device in (gpu.id, gpu.device)]
        if same:
            bound[device] = same[0]
        elif is_host_device(device):
            raise UsageError(_not_there(device, pool, named=bool(named)))
    others = [gpu for gpu in pool if gpu not in bound.values()]
    for device in wanted:
        if device in bound:
            continue
        if not others:
            raise UsageError(_too_few(device, bound, named=bool(named)))
        bound[device] = others.pop(0)
    used = [gpu for gpu in pool if gpu in bound.values()]
    if any(not ids or ANY_GPU in ids for ids in planned.devices):
        used = [gpu for gpu in pool if gpu in named or gpu in used]
    if idle := [gpu for gpu in named if gpu not in used]:
        names = dict.fromkeys(name for ids in planned.devices for name in ids)
        raise UsageError(f"--gpu {idle[0].device}: no block of the plan uses it; its devices are {', '.join(names)}")
    return Bound(planned=_with_real_ids(planned, bound), gpus=tuple(used))


def _wanted(planned: PlannedSplit, named: Sequence[HostGpu]) -> list[str]:
    """Returns the ids of the plan's GPUs, in order, each once."""
    names = {name for gpu in named for name in (gpu.id, gpu.device)}
    wanted: dict[str, None] = {}
    for ids, class_name in zip(planned.devices, planned.told_classes, strict=True):
        for device in ids:
            if device not in (ANY_GPU, ANY_CPU) and (
                is_gpu(class_name) if class_name else is_gpu(device) or device in names
            ):
                wanted[device] = None
    return list(wanted)


def _with_real_ids(planned: PlannedSplit, bound: dict[str, HostGpu]) -> PlannedSplit:
    """Returns the plan with real ids in place of its GPU names. CPU workers may stand in on stages with GPUs."""
    devices, classes, reasons = list(planned.devices), list(planned.told_classes), list(planned.reasons)
    for stage, (ids, class_name) in enumerate(zip(planned.devices, planned.told_classes, strict=True)):
        gpus = (
            {}
            if class_name and not is_gpu(class_name)
            else {device: bound[device].id for device in ids if device in bound}
        )
        if gpus:
            devices[stage] = tuple(dict.fromkeys((*(gpus.get(device, device) for device in ids), ANY_CPU)))
            classes[stage] = class_name or "GPU"
            renamed = [f"{device} is {real}" for device, real in gpus.items() if device != real]
            reasons[stage] = "; ".join([planned.reasons[stage], *renamed])
    return replace(
        planned, devices=tuple(devices), classes=tuple(classes) if any(classes) else (), reasons=tuple(reasons)
    )


def _not_there(device: str, pool: Sequence[HostGpu], *, named: bool) -> str:
    others = ", ".join(gpu.device for gpu in pool)
    if named:
        return f"the plan is for {device}, and --gpu names {others}"
    return f"the plan is for {device}: no such device here, {f'but {others}' if others else 'nor another GPU'}; {_SEE}"


def _too_few(device: str, bound: dict[str, HostGpu], *, named: bool) -> str:
    taken = " and ".join(f"{name} is {gpu.device}" for name, gpu in bound.items())
    if named:
        return f"the plan is for {device}, and --gpu names no {'further ' if taken else ''}device for it: {taken}"
    lacking = "here is no other GPU" if taken else "here is no GPU"
    return f"the plan is for {device}, and {lacking}{f' ({taken})' if taken else ''}; {_SEE}"


_SEE = f"see {typed('devices')}, or name one with --gpu"

"""Which GPUs of a host a plan's devices are: by their ids, else by their class, in order. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from blockrelay.errors import UsageError
from blockrelay.protocol.planned_split import ANY_CPU, ANY_GPU, PlannedSplit, is_gpu, is_host_device
from blockrelay.typed_command import typed


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGpu:
    """A device of this host. Plans know it by its `id`, `device` is what `--gpu` of a worker takes: the same, or a
    UUID. `problem`: why it cannot be used now, although it is here."""

    id: str
    device: str
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The plan with the ids of real devices, and those that it uses, in the order of their naming."""

    planned: PlannedSplit
    gpus: tuple[HostGpu, ...]


def bind(planned: PlannedSplit, named: Sequence[HostGpu], here: Callable[[], Sequence[HostGpu]]) -> Bound:
    """Devices of the plan that are GPUs are those of this host, or of `named` (`--gpu`) where it names some, with the
    same id, then the others in order. `here` are those of this host, asked only where the plan has GPUs and nobody has
    named one.

    Raises UsageError, one line, for a device of the plan that is not there, and for a named one that no block uses.
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
    """The ids of the plan's GPUs, in order, each once."""
    names = {name for gpu in named for name in (gpu.id, gpu.device)}
    wanted: dict[str, None] = {}
    for ids, told in zip(planned.devices, planned.told_classes, strict=True):
        for device in ids:
            if device not in (ANY_GPU, ANY_CPU) and (is_gpu(told) if told else is_gpu(device) or device in names):
                wanted[device] = None
    return list(wanted)


def _with_real_ids(planned: PlannedSplit, bound: dict[str, HostGpu]) -> PlannedSplit:
    """CPU workers stand in where GPUs are."""
    devices, classes, reasons = list(planned.devices), list(planned.told_classes), list(planned.reasons)
    for stage, (ids, told) in enumerate(zip(planned.devices, planned.told_classes, strict=True)):
        gpus = {} if told and not is_gpu(told) else {device: bound[device].id for device in ids if device in bound}
        if gpus:
            devices[stage] = tuple(dict.fromkeys((*(gpus.get(device, device) for device in ids), ANY_CPU)))
            classes[stage] = told or "GPU"
            renamed = [f"{device} is {real}" for device, real in gpus.items() if device != real]
            reasons[stage] = "; ".join([planned.reasons[stage], *renamed])
    return replace(
        planned, devices=tuple(devices), classes=tuple(classes) if any(classes) else (), reasons=tuple(reasons)
    )


def _not_there(device: str, pool: Sequence[HostGpu], *, named: bool) -> str:
    found = ", ".join(gpu.device for gpu in pool)
    if named:
        return f"the plan is for {device}, and --gpu names {found}"
    return f"the plan is for {device}: no such device here, {f'but {found}' if found else 'nor another GPU'}; {_SEE}"


def _too_few(device: str, bound: dict[str, HostGpu], *, named: bool) -> str:
    taken = " and ".join(f"{name} is {gpu.device}" for name, gpu in bound.items())
    if named:
        return f"the plan is for {device}, and --gpu names no {'further ' if taken else ''}device for it: {taken}"
    lacking = "here is no other GPU" if taken else "here is no GPU"
    return f"the plan is for {device}, and {lacking}{f' ({taken})' if taken else ''}; {_SEE}"


_SEE = f"see {typed('devices')}, or name one with --gpu"

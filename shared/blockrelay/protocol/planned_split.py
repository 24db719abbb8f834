"""A model cut into stages, with the devices and the reason of each: what schedulers publish plans of."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

from blockrelay.errors import UsageError
from blockrelay.protocol.plan import CPU, GPU, Stage, split_text, uniform_split

_BLOCKS = re.compile(r"([0-9]{1,6})-([0-9]{1,6})")
_BLOCK = re.compile(r"block_([1-9][0-9]{0,5})")
_MAX_TEXT, _MAX_DEVICES, _MAX_NAME = 500, 1024, 64
#: What stands for all devices of a class among the ids of a stage; no id has it.
ANY_GPU, ANY_CPU = "gpu:*", "cpu:*"
#: The devices of a stage that a class names: CPUs stand in for GPUs.
_CLASSES: Mapping[str, tuple[str, ...]] = {GPU: (ANY_GPU, ANY_CPU), CPU: (ANY_CPU,)}
#: How classes and ids of devices begin that are no CPUs, in upper case.
_GPUS = ("GPU", "CUDA", "WEBGPU", "DIRECTML", "OPENVINO", "NPU")
_HOST_DEVICE = re.compile(r"(cuda|webgpu|directml):[0-9]+|openvino:[A-Z]+(\.[0-9]+)?|GPU-[0-9a-f-]+")


def is_gpu(name: str) -> bool:
    """Whether a class of devices, or an id whose class nobody tells, is that of a GPU or an NPU: GPU, gpu0, cuda:1."""
    return name.upper().startswith(_GPUS)


def is_host_device(name: str) -> bool:
    """Whether an id is that of a device of a host, as `blockrelay devices` shows them, and no name of a plan's own."""
    return _HOST_DEVICE.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSplit:
    """Stages that cover all blocks of a model. Of each, in the same order, `reasons` has why it has these, `devices`
    the ids of those that are to run it, or ANY_GPU and ANY_CPU (none: whichever come), `classes` their class as the
    plan tells it ("": it does not); no classes at all: it tells none."""

    stages: tuple[Stage, ...]
    reasons: tuple[str, ...]
    devices: tuple[tuple[str, ...], ...]
    classes: tuple[str, ...] = ()

    @property
    def told_classes(self) -> tuple[str, ...]:
        """`classes`, one for each stage."""
        return self.classes or ("",) * len(self.stages)

    @property
    def for_gpus(self) -> tuple[bool, ...]:
        """Whether each stage names GPUs: by its class, or by the ids of its devices where it tells no class."""
        told = zip(self.told_classes, self.devices, strict=True)
        return tuple(is_gpu(name) if name else any(map(is_gpu, ids)) for name, ids in told)

    @property
    def text(self) -> str:
        """The split, `1-3,4-9`."""
        return split_text(self.stages)

    @property
    def blocks(self) -> int:
        """Of the model."""
        return self.stages[-1].last

    def serves_as(self, other: "PlannedSplit") -> bool:
        """Whether it puts the same blocks on the same devices, for whatever reasons."""
        return (self.stages, self.devices) == (other.stages, other.devices)

    def to_json(self) -> str:
        """In the form that `parse_planned` reads."""
        told = zip(self.stages, self.devices, self.reasons, self.told_classes, strict=True)
        stages = [
            {
                "blocks": f"{stage.first}-{stage.last}",
                "devices": devices,
                "why": why,
                **({"class": name} if name else {}),
            }
            for stage, devices, why, name in told
        ]
        return json.dumps({"stages": stages})


def equal_parts(blocks: int, stages: int, *, stage_devices: str = "") -> PlannedSplit:
    """As many equal parts, for any device, or for those of classes such as `gpu,cpu,gpu`.

    UsageError for more than there are blocks, or none, and for classes that are not one for each.
    """
    classes = [part.strip() for part in stage_devices.split(",")] if stage_devices else []
    if strays := [one for one in classes if one not in _CLASSES]:
        raise UsageError(f"{strays[0]!r} is no class of devices: gpu or cpu for each stage, such as gpu,cpu,gpu")
    if classes and len(classes) != stages:
        raise UsageError(f"{stage_devices} are the devices of {len(classes)} stages, and there are {stages}")
    split = uniform_split(blocks, stages)
    sizes = [stage.last - stage.first + 1 for stage in split]
    why = ["the whole model" if stages == 1 else f"{size} of {blocks} blocks in {stages} equal parts" for size in sizes]
    devices = tuple(_CLASSES[one] for one in classes) or ((),) * stages
    return PlannedSplit(stages=split, reasons=tuple(why), devices=devices)


def planned_for(devices: Sequence[str], reason: object = None) -> str:
    """Why a stage of a planner has its blocks."""
    return f"planned for {' and '.join(devices) or 'any device'}" + (f" ({reason})" if reason else "")


def parse_planned(content: str | bytes, where: str) -> PlannedSplit:
    """What `to_json` or `blockrelay plan --json` wrote, or blocks with their classes, `{"block_1": "GPU"}`, also as
    `plan` of an object. UsageError names `where` it comes from, in one line."""
    try:
        given = cast(dict[str, Any], json.loads(content, object_pairs_hook=_once))
        if "stages" in given:
            found = [_stage(entry) for entry in cast(list[dict[str, Any]], given["stages"])]
        else:
            found = _runs(given.get("plan", given), where)
    except _Twice as twice:
        raise UsageError(f"{where}: {twice} is there twice") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(
            f"{where}: not what `blockrelay plan --json` writes: stages with their blocks, or the class of each block, "
            'as {"block_1": "CPU"}'
        ) from None
    if not found:
        raise UsageError(f"{where}: a plan without stages")
    stages, devices, reasons, classes = zip(*found, strict=True)
    _check_consecutive(stages, where)
    return PlannedSplit(stages=stages, reasons=reasons, devices=devices, classes=classes if any(classes) else ())


def _check_consecutive(stages: Sequence[Stage], where: str) -> None:
    """Raises UsageError for a gap, an overlap and a stage without blocks; it names the block."""
    expected = 1
    for at, stage in enumerate(stages):
        text = f"{stage.first}-{stage.last}"
        if not 1 <= stage.first <= stage.last:
            raise UsageError(f"{where}: stage {text} is no run of blocks")
        if stage.first > expected:
            raise UsageError(f"{where}: block_{expected} is in no stage before stage {text}")
        if stage.first < expected:
            other = next(one for one in stages[:at] if one.last >= stage.first)
            twice = f"block_{stage.first} is in stage {text} and in stage {other.first}-{other.last} before it"
            raise UsageError(f"{where}: {twice}")
        expected = stage.last + 1


_Read = tuple[Stage, tuple[str, ...], str, str]


def _stage(entry: Mapping[str, Any]) -> _Read:
    """A stage, its devices, why it is so, and its class. Raises ValueError, KeyError, TypeError or AttributeError for
    something else."""
    blocks = _BLOCKS.fullmatch(entry["blocks"])
    if blocks is None:
        raise ValueError
    given: Any = entry.get("devices") or ([entry["device"]] if entry.get("device") else [])
    devices = tuple(map(_text, cast(list[Any], given)))
    if isinstance(given, str) or len(devices) > _MAX_DEVICES:
        raise ValueError
    why = entry.get("why")
    if why is None:
        why = planned_for(devices, entry.get("reason"))
    name = _text(entry.get("class") or "")[:_MAX_NAME]
    return Stage(first=int(blocks[1]), last=int(blocks[2])), devices, _text(why), name


def _runs(classes: Any, where: str) -> list[_Read]:
    """Stages of consecutive blocks of one class, `gpu` or `cpu`. Raises UsageError for other blocks and classes, and
    what `_stage` raises."""
    blocks: dict[int, str] = {}
    for name, given in cast(dict[str, Any], classes).items():
        device = given.lower() if isinstance(given, str) else str(given)
        number = _BLOCK.fullmatch(name)
        if number is None:
            raise UsageError(f"{where}: {name[:_MAX_NAME]!r} is no block: they are called block_1, block_2 and so on")
        if device not in _CLASSES:
            raise UsageError(f"{where}: {name} is for {device[:_MAX_NAME]!r}: a block is for GPU or CPU")
        blocks[int(number[1])] = device
    if not blocks:
        raise ValueError
    if lacking := [number for number in range(1, max(blocks)) if number not in blocks]:
        raise UsageError(f"{where}: block_{lacking[0]} is missing")
    runs = [list(run) for _, run in groupby(range(1, len(blocks) + 1), blocks.__getitem__)]
    return [
        (
            Stage(first=run[0], last=run[-1]),
            _CLASSES[blocks[run[0]]],
            f"the plan has {blocks[run[0]].upper()} for it",
            blocks[run[0]].upper(),
        )
        for run in runs
    ]


class _Twice(Exception):
    """A block that is there twice, by its name."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises _Twice for a block that it has twice: json would take the last one."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found and _BLOCK.fullmatch(name):
            raise _Twice(name)
        found[name] = value
    return found


def _text(value: Any) -> str:
    """One line. Raises ValueError for what is no text."""
    if not isinstance(value, str):
        raise ValueError
    return " ".join(value.split())[:_MAX_TEXT]

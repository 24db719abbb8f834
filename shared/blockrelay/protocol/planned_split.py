"""The split of a model into stages, with the devices and the reason of each, from which schedulers make plans."""

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
#: Entries that stand for all devices of a class among the device ids of a stage; no device has such an id.
ANY_GPU, ANY_CPU = "gpu:*", "cpu:*"
#: Device ids of a stage for each class. CPUs stand in for GPUs.
_CLASSES: Mapping[str, tuple[str, ...]] = {GPU: (ANY_GPU, ANY_CPU), CPU: (ANY_CPU,)}
#: Prefixes, in upper case, of the classes and ids of GPUs and NPUs.
_GPUS = ("GPU", "CUDA", "WEBGPU", "DIRECTML", "OPENVINO", "NPU")
_HOST_DEVICE = re.compile(r"(cuda|webgpu|directml):[0-9]+|openvino:[A-Z]+(\.[0-9]+)?|GPU-[0-9a-f-]+")


def is_gpu(name: str) -> bool:
    """Returns whether `name`, a class of devices or the id of a device, is that of a GPU or NPU: GPU, gpu0, cuda:1."""
    return name.upper().startswith(_GPUS)


def is_host_device(name: str) -> bool:
    """Returns whether `name` is a device id as `blockrelay devices` shows it, not a name that a plan made up."""
    return _HOST_DEVICE.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSplit:
    """Stages that cover all blocks of a model, with the reason and devices of each in the same order."""

    stages: tuple[Stage, ...]
    reasons: tuple[str, ...]  # one sentence per stage
    devices: tuple[tuple[str, ...], ...]  # per stage, device ids, or ANY_GPU and ANY_CPU; none: any device
    classes: tuple[str, ...] = ()  # per stage, the class of device that the plan names; "" or no classes: it names none
    folder: str = ""  # key of the block folder that workers are to serve; "": that with which they started

    @property
    def told_classes(self) -> tuple[str, ...]:
        """One entry of `classes` for each stage; "" for each where the plan names no classes."""
        return self.classes or ("",) * len(self.stages)

    @property
    def for_gpus(self) -> tuple[bool, ...]:
        """For each stage, whether it names a GPU: by its class, or without a class by the ids of its devices."""
        stages = zip(self.told_classes, self.devices, strict=True)
        return tuple(is_gpu(name) if name else any(map(is_gpu, ids)) for name, ids in stages)

    @property
    def text(self) -> str:
        """The split as text, `1-3,4-9`."""
        return split_text(self.stages)

    @property
    def blocks(self) -> int:
        """Number of blocks of the model."""
        return self.stages[-1].last

    def serves_as(self, other: "PlannedSplit") -> bool:
        """Returns whether both put the same blocks of one folder on the same devices; reasons may differ."""
        return (self.stages, self.devices, self.folder) == (other.stages, other.devices, other.folder)

    def to_json(self) -> str:
        """Returns the JSON that `parse_planned` reads."""
        parts = zip(self.stages, self.devices, self.reasons, self.told_classes, strict=True)
        stages = [
            {
                "blocks": f"{stage.first}-{stage.last}",
                "devices": devices,
                "why": why,
                **({"class": name} if name else {}),
            }
            for stage, devices, why, name in parts
        ]
        return json.dumps({"stages": stages, **({"folder": self.folder} if self.folder else {})})


def equal_parts(blocks: int, stages: int, *, stage_devices: str = "") -> PlannedSplit:
    """Splits a model into `stages` stages of equal size, for any device or for classes such as `gpu,cpu,gpu`.

    Raises UsageError for no stages, for more stages than blocks, and unless `stage_devices` is empty or names one
    class per stage.
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
    """Returns the reason for a stage that a planner laid out for `devices`, with its own `reason`, if any."""
    return f"planned for {' and '.join(devices) or 'any device'}" + (f" ({reason})" if reason else "")


def parse_planned(content: str | bytes, where: str) -> PlannedSplit:
    """Reads a split from JSON.

    Takes what `to_json` and `blockrelay plan --json` write, or the class of each block, `{"block_1": "GPU"}`, alone or
    as the field `plan` of an object. Raises UsageError, one line that begins with `where` the content comes from.
    """
    try:
        document = cast(dict[str, Any], json.loads(content, object_pairs_hook=_once))
        if "stages" in document:
            parts = [_stage(entry) for entry in cast(list[dict[str, Any]], document["stages"])]
            folder = _text(document.get("folder", ""))[:_MAX_NAME]
        else:
            parts, folder = _runs(document.get("plan", document), where), ""
    except _Twice as twice:
        raise UsageError(f"{where}: {twice} is there twice") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(
            f"{where}: not what `blockrelay plan --json` writes: stages with their blocks, or the class of each block, "
            'as {"block_1": "CPU"}'
        ) from None
    if not parts:
        raise UsageError(f"{where}: a plan without stages")
    stages, devices, reasons, classes = zip(*parts, strict=True)
    _check_consecutive(stages, where)
    classes = classes if any(classes) else ()
    return PlannedSplit(stages=stages, reasons=reasons, devices=devices, classes=classes, folder=folder)


def _check_consecutive(stages: Sequence[Stage], where: str) -> None:
    """Raises UsageError, which names the block, for a gap, an overlap or a stage without blocks."""
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


#: A stage, its devices, its reason and its class.
_Read = tuple[Stage, tuple[str, ...], str, str]


def _stage(entry: Mapping[str, Any]) -> _Read:
    """Reads one stage of a plan. Raises ValueError, KeyError, TypeError or AttributeError for anything else."""
    blocks = _BLOCKS.fullmatch(entry["blocks"])
    if blocks is None:
        raise ValueError
    listed: Any = entry.get("devices") or ([entry["device"]] if entry.get("device") else [])
    devices = tuple(map(_text, cast(list[Any], listed)))
    if isinstance(listed, str) or len(devices) > _MAX_DEVICES:
        raise ValueError
    why = entry.get("why")
    if why is None:
        why = planned_for(devices, entry.get("reason"))
    name = _text(entry.get("class") or "")[:_MAX_NAME]
    return Stage(first=int(blocks[1]), last=int(blocks[2])), devices, _text(why), name


def _runs(classes: Any, where: str) -> list[_Read]:
    """Returns one stage for each run of consecutive blocks of one class, `gpu` or `cpu`.

    Raises UsageError for other blocks and classes, and what `_stage` raises.
    """
    blocks: dict[int, str] = {}
    for name, value in cast(dict[str, Any], classes).items():
        device = value.lower() if isinstance(value, str) else str(value)
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
    """A block is in a JSON object twice; the message is its name."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a JSON object. Raises _Twice for a block that is in it twice, of which json would keep the last."""
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries and _BLOCK.fullmatch(name):
            raise _Twice(name)
        entries[name] = value
    return entries


def _text(value: Any) -> str:
    """Returns `value` as one line, cut at _MAX_TEXT characters. Raises ValueError if it is no text."""
    if not isinstance(value, str):
        raise ValueError
    return " ".join(value.split())[:_MAX_TEXT]

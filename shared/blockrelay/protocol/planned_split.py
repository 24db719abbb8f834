"""A model cut into stages, with the devices and the reason of each: what schedulers publish plans of."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from blockrelay.errors import UsageError
from blockrelay.protocol.plan import Stage, split_text, uniform_split

_BLOCKS = re.compile(r"([0-9]{1,6})-([0-9]{1,6})")
_MAX_TEXT, _MAX_DEVICES = 500, 1024
#: What stands for all devices of a class among the ids of a stage; no id has it.
ANY_GPU, ANY_CPU = "gpu:*", "cpu:*"
#: The devices of a stage that a class names: CPUs stand in for GPUs.
_CLASSES: Mapping[str, tuple[str, ...]] = {"gpu": (ANY_GPU, ANY_CPU), "cpu": (ANY_CPU,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSplit:
    """Stages that cover all blocks of a model. Of each, in the same order, `reasons` has why it has these, `devices`
    the ids of those that are to run it, or ANY_GPU and ANY_CPU; none: whichever come."""

    stages: tuple[Stage, ...]
    reasons: tuple[str, ...]
    devices: tuple[tuple[str, ...], ...]

    @property
    def device_ids(self) -> tuple[tuple[str, ...], ...]:
        """`devices` without classes."""
        return tuple(tuple(one for one in ids if one not in (ANY_GPU, ANY_CPU)) for ids in self.devices)

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
        stages = [
            {"blocks": f"{stage.first}-{stage.last}", "devices": devices, "why": why}
            for stage, devices, why in zip(self.stages, self.devices, self.reasons, strict=True)
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


def check_possible(planned: PlannedSplit, *, together: bool) -> None:
    """Raises UsageError for several stages of a model whose blocks are run `together`: ONNX blocks as they are."""
    if together and len(planned.stages) > 1:
        raise UsageError(
            f"{len(planned.stages)} stages: ONNX blocks as they are run in one; `blockrelay import` makes blocks of "
            "them that can be cut into stages"
        )


def planned_for(devices: Sequence[str], reason: object = None) -> str:
    """Why a stage of a planner has its blocks."""
    return f"planned for {' and '.join(devices) or 'any device'}" + (f" ({reason})" if reason else "")


def parse_planned(content: str | bytes, where: str) -> PlannedSplit:
    """What `to_json` or `blockrelay plan --json` wrote. UsageError names `where` it comes from, in one line."""
    try:
        entries = cast(list[dict[str, Any]], json.loads(content)["stages"])
        found = [_stage(entry) for entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{where}: not what `blockrelay plan --json` writes: stages with their blocks") from None
    expected = 1
    for stage, _, _ in found:
        if stage.first != expected or stage.last < stage.first:
            raise UsageError(f"{where}: stage {stage.first}-{stage.last} does not continue at block_{expected}")
        expected = stage.last + 1
    if not found:
        raise UsageError(f"{where}: a plan without stages")
    stages, devices, reasons = zip(*found, strict=True)
    return PlannedSplit(stages=stages, reasons=reasons, devices=devices)


def _stage(entry: Mapping[str, Any]) -> tuple[Stage, tuple[str, ...], str]:
    """A stage, its devices and why it is so. Raises ValueError, KeyError, TypeError or AttributeError for something
    else."""
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
    return Stage(first=int(blocks[1]), last=int(blocks[2])), devices, _text(why)


def _text(value: Any) -> str:
    """One line. Raises ValueError for what is no text."""
    if not isinstance(value, str):
        raise ValueError
    return " ".join(value.split())[:_MAX_TEXT]

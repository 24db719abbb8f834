"""Which GPUs of this machine `up` takes, of what `blockrelay devices` finds: those that `--gpu` or a topology names,
with `--gpu-workers N` the first N, and for a plan's GPUs all."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from blockrelay.errors import UsageError
from blockrelay.exit_codes import PREFIX
from blockrelay.protocol.planned_split import is_host_device
from blockrelay.settings import WorkerSettings
from blockrelay.typed_command import typed
from blockrelay_launcher.up_options.device_binding import HostGpu

#: How long devices may take to say what they can do: some are asked for the first time, with shaders to compile.
PROBE_S = 300.0

Device = Mapping[str, Any]


def first_gpus(count: int) -> tuple[HostGpu, ...]:
    """The first `count` GPUs. Raises UsageError where there are fewer."""
    return chosen(_devices_here("--gpu-workers"), count)


def named_gpus(names: Sequence[str], option: str = "--gpu") -> tuple[HostGpu, ...]:
    """The devices of these names, ids, UUIDs or the beginning of one. Raises UsageError for one that is not here; one
    that is here and cannot be used is taken, since a system shall start again without it."""
    if not names:
        return ()
    try:
        devices = _devices_here(option)
    except _NoAnswer as error:  # a driver may take along who asks
        if strays := [name for name in names if not is_host_device(name)]:
            raise UsageError(f"{option} {strays[0]}: {error}") from None
        return tuple(HostGpu(id=name, device=name, problem=str(error)) for name in names)
    return checked(devices, names, option)


def known_gpus(gpus: Sequence[HostGpu]) -> tuple[HostGpu, ...]:
    """The devices that a topology has for this host, with what keeps them from being used now. Raises UsageError for
    one that is not here."""
    found = named_gpus([gpu.device for gpu in gpus], "--topology, device")
    return tuple(replace(gpu, problem=one.problem) for gpu, one in zip(gpus, found, strict=True))


def gpus_here() -> tuple[HostGpu, ...]:
    """The GPUs of this host that a plan may have, usable ones first."""
    return _in_order(_devices_here("--plan"))


def checked(devices: Sequence[Device], names: Sequence[str], option: str = "--gpu") -> tuple[HostGpu, ...]:
    """The same of what was found. Raises UsageError, one line that says what is wrong with which."""
    taken: dict[str, HostGpu] = {}
    for name in names:
        # What has no devices at all is listed by its provider's name alone.
        found = [one for one in devices if name == one["id"] or str(one.get("uuid") or "").startswith(name)]
        found = found or [one for one in devices if one["id"] == name.partition(":")[0] and one["problem"]]
        if not found:
            usable = ", ".join(str(one["id"]) for one in devices if one["kind"] != "cpu" and not one["problem"])
            there = f"but {usable}" if usable else "nor another GPU that can be used"
            raise UsageError(f"{option} {name}: no such device here, {there}; see {typed('devices')}")
        if _is_missing(found[0]):
            raise UsageError(f"{option} {name}: {found[0]['problem']}")
        device = str(found[0]["id"])
        if device in taken:
            raise UsageError(f"{option} {name}: {device} is named twice; it has a process for all its stages")
        taken[device] = HostGpu(id=device, device=name, problem=str(found[0]["problem"]))
    return tuple(taken.values())


class _NoAnswer(UsageError):
    """Devices were asked, and who asked them has not come back."""


def _devices_here(option: str) -> list[dict[str, Any]]:
    """What `blockrelay devices` finds, under the Python that has the devices' packages; `option` is named in errors."""
    python = WorkerSettings().gpu_python or sys.executable
    command = [python, "-P", "-m", "blockrelay_worker.offline.devices", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PROBE_S)
    except OSError as error:
        raise UsageError(f"BLOCKRELAY_GPU_PYTHON: {python} cannot be run: {error}") from error
    except subprocess.TimeoutExpired:
        raise _NoAnswer(f"blockrelay devices gave no answer for {PROBE_S:.0f} s") from None
    if done.returncode < 0:
        raise _NoAnswer(f"blockrelay devices was ended by signal {-done.returncode}")
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it says nothing"]
        raise UsageError(
            f"{option}: blockrelay devices ended with code {done.returncode}: {said[-1].removeprefix(PREFIX)}"
        )
    return json.loads(done.stdout)["devices"]


def chosen(devices: Sequence[Device], count: int) -> tuple[HostGpu, ...]:
    """The first `count` GPUs of what was found. Raises UsageError, one line that says what there is."""
    gpus = _in_order(devices)
    if len(gpus) < count:
        problems = "; ".join(f"{one['id']}: {one['problem']}" for one in devices if _is_gpu(one) and one["problem"])
        found = ", ".join(gpu.id for gpu in gpus) or f"no GPU that can be used ({problems or 'none was found'})"
        raise UsageError(f"--gpu-workers {count}: here is {found}; see {typed('devices')}")
    return gpus[:count]


def _in_order(devices: Sequence[Device]) -> tuple[HostGpu, ...]:
    """The GPUs among `devices`: usable ones first, then those that are here and cannot be used now."""
    here = [one for one in devices if _is_gpu(one) and not _is_missing(one)]
    taken: list[Device] = []
    for one in sorted(here, key=lambda one: bool(one["problem"])):
        # Several providers show the same card: the first that has one of a vendor has all of that vendor.
        elsewhere = {_provider(other) for other in taken if one["vendor"] and other["vendor"] == one["vendor"]}
        if elsewhere <= {_provider(one)}:
            taken.append(one)
    return tuple(HostGpu(id=str(one["id"]), device=str(one["id"]), problem=str(one["problem"])) for one in taken)


def _is_gpu(device: Device) -> bool:
    return device["kind"] == "gpu"


def _is_missing(device: Device) -> bool:
    """Whether there is no such device, or not what it needs; else a problem is one of the moment. Releases that do not
    tell them apart tell of the first alone."""
    return bool(device["problem"]) and bool(device.get("missing", True))


def _provider(device: Device) -> str:
    return str(device["id"]).partition(":")[0]

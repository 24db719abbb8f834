"""Chooses GPUs of this machine for `up` among those that `blockrelay devices` finds.

These are the GPUs that `--gpu` or a topology names, the first N with `--gpu-workers N`, or all for a plan with GPUs.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from blockrelay.errors import UsageError
from blockrelay.host.child_command import module_command, run_command
from blockrelay.protocol.plan import CPU, GPU
from blockrelay.protocol.planned_split import is_host_device
from blockrelay.settings import WorkerSettings
from blockrelay.typed_command import typed
from blockrelay_launcher.policy import DEVICE_PROBE_S
from blockrelay_launcher.up_options.device_binding import HostGpu

Device = Mapping[str, Any]
"""One device in the output of `blockrelay devices --json`."""


def first_gpus(count: int) -> tuple[HostGpu, ...]:
    """Returns the first `count` GPUs of this machine. Raises UsageError if there are fewer or they cannot be listed."""
    return chosen(_devices_here("--gpu-workers"), count)


def named_gpus(names: Sequence[str], option: str = "--gpu") -> tuple[HostGpu, ...]:
    """Returns the devices with these names: ids, UUIDs or the beginning of a UUID.

    A device that exists and cannot be used now is returned with its problem, because a system must be able to start
    without it. A probe of the devices that is killed or too slow counts as such a problem, if all names are ids.
    Raises UsageError for a device that does not exist or is named twice, if the probe ends with an error or cannot be
    started, and for a UUID if it gives no answer. `option` is named in most errors.
    """
    if not names:
        return ()
    try:
        devices = _devices_here(option)
    except _NoAnswer as error:  # a broken driver may kill the process that asks it
        if strays := [name for name in names if not is_host_device(name)]:
            raise UsageError(f"{option} {strays[0]}: {error}") from None
        return tuple(HostGpu(id=name, device=name, problem=str(error)) for name in names)
    return checked(devices, names, option)


def known_gpus(gpus: Sequence[HostGpu]) -> tuple[HostGpu, ...]:
    """Returns the GPUs that a topology has for this host, with their present problems.

    Raises UsageError in the cases of `named_gpus`, such as for one that does not exist, or if `blockrelay devices` ends
    with an error.
    """
    devices = named_gpus([gpu.device for gpu in gpus], "--topology, device")
    return tuple(replace(gpu, problem=one.problem) for gpu, one in zip(gpus, devices, strict=True))


def gpus_here() -> tuple[HostGpu, ...]:
    """Returns the GPUs of this host that a plan may have, usable ones first.

    Raises UsageError if they cannot be listed.
    """
    return _in_order(_devices_here("--plan"))


def checked(devices: Sequence[Device], names: Sequence[str], option: str = "--gpu") -> tuple[HostGpu, ...]:
    """Returns the ones of `devices` that have these names, as `named_gpus`; each name must be a different device.

    Raises UsageError that names the device and the problem.
    """
    taken: dict[str, HostGpu] = {}
    for name in names:
        # A provider without devices is listed by its own name alone, with the problem.
        matches = [one for one in devices if name == one["id"] or str(one.get("uuid") or "").startswith(name)]
        matches = matches or [one for one in devices if one["id"] == name.partition(":")[0] and one["problem"]]
        if not matches:
            usable = ", ".join(str(one["id"]) for one in devices if one["kind"] != CPU and not one["problem"])
            there = f"but {usable}" if usable else "nor another GPU that can be used"
            raise UsageError(f"{option} {name}: no such device here, {there}; see {typed('devices')}")
        if _is_missing(matches[0]):
            raise UsageError(f"{option} {name}: {matches[0]['problem']}")
        device = str(matches[0]["id"])
        if device in taken:
            raise UsageError(f"{option} {name}: {device} is named twice; it has a process for all its stages")
        taken[device] = HostGpu(id=device, device=name, problem=str(matches[0]["problem"]))
    return tuple(taken.values())


class _NoAnswer(UsageError):
    """The process that probes the devices was killed or gave no answer in time."""


def _devices_here(option: str) -> list[dict[str, Any]]:
    """Runs `blockrelay devices` under the Python that has the GPUs' packages, and returns the devices.

    Raises UsageError, which names `option`, or _NoAnswer.
    """
    python = WorkerSettings().gpu_python or sys.executable
    command = module_command("blockrelay_worker.offline.devices", "--json", python=python)
    try:
        done = run_command(command, timeout_s=DEVICE_PROBE_S)
    except OSError as error:
        raise UsageError(f"BLOCKRELAY_GPU_PYTHON: {python} cannot be run: {error}") from error
    except subprocess.TimeoutExpired:
        raise _NoAnswer(f"blockrelay devices gave no answer for {DEVICE_PROBE_S:.0f} s") from None
    if done.code < 0:
        raise _NoAnswer(f"blockrelay devices was ended by signal {-done.code}")
    if done.code:
        raise UsageError(f"{option}: blockrelay devices ended with code {done.code}: {done.last_line}")
    return json.loads(done.stdout)["devices"]


def chosen(devices: Sequence[Device], count: int) -> tuple[HostGpu, ...]:
    """Returns the first `count` GPUs among `devices`, usable ones first. Raises UsageError if there are fewer."""
    gpus = _in_order(devices)
    if len(gpus) < count:
        problems = "; ".join(
            f"{one['id']}: {one['problem']}" for one in devices if one["kind"] == GPU and one["problem"]
        )
        names = ", ".join(gpu.id for gpu in gpus) or f"no GPU that can be used ({problems or 'none was found'})"
        raise UsageError(f"--gpu-workers {count}: here is {names}; see {typed('devices')}")
    return gpus[:count]


def _in_order(devices: Sequence[Device]) -> tuple[HostGpu, ...]:
    """Returns the GPUs among `devices`: usable ones first, then those that exist and cannot be used now."""
    here = [one for one in devices if one["kind"] == GPU and not _is_missing(one)]
    taken: list[Device] = []
    for one in sorted(here, key=lambda one: bool(one["problem"])):
        # Several providers show the same card: all cards of a vendor come from the first provider that has one.
        elsewhere = {_provider(other) for other in taken if one["vendor"] and other["vendor"] == one["vendor"]}
        if elsewhere <= {_provider(one)}:
            taken.append(one)
    return tuple(HostGpu(id=str(one["id"]), device=str(one["id"]), problem=str(one["problem"])) for one in taken)


def _is_missing(device: Device) -> bool:
    """True if the device or its software does not exist; a problem of another kind may pass.

    Older releases report only problems of the first kind, without the field.
    """
    return bool(device["problem"]) and bool(device.get("missing", True))


def _provider(device: Device) -> str:
    return str(device["id"]).partition(":")[0]

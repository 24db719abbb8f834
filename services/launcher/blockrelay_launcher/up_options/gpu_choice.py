"""Which GPUs of this machine `up` takes: those that `--gpu` names, or with `--gpu-workers N` the first N, of what
`blockrelay devices` says can be used."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from blockrelay.errors import UsageError
from blockrelay.settings import WorkerSettings


def first_gpus(count: int) -> tuple[str, ...]:
    """Their ids. Raises UsageError where there are fewer."""
    return chosen(_devices_here("--gpu-workers"), count)


def named_gpus(names: Sequence[str]) -> tuple[str, ...]:
    """`names` as they are. Raises UsageError for one that is not here or cannot be used."""
    if names:
        check_named(_devices_here("--gpu"), names)
    return tuple(names)


def check_named(devices: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Names are ids, UUIDs or the beginning of one. Raises UsageError, one line that says what is wrong with which."""
    taken: set[str] = set()
    for name in names:
        # What has no devices at all is listed by its provider's name alone.
        found = [one for one in devices if name == one["id"] or str(one.get("uuid") or "").startswith(name)]
        found = found or [one for one in devices if one["id"] == name.partition(":")[0] and one["problem"]]
        if not found:
            usable = ", ".join(str(one["id"]) for one in devices if one["kind"] != "cpu" and not one["problem"])
            there = f"but {usable}" if usable else "nor another GPU that can be used"
            raise UsageError(f"--gpu {name}: no such device here, {there}; see blockrelay devices")
        if found[0]["problem"]:
            raise UsageError(f"--gpu {name}: {found[0]['problem']}")
        device = str(found[0]["id"])
        if device in taken:
            raise UsageError(f"--gpu {name}: {device} is named twice; it has a process for all its stages")
        taken.add(device)


def _devices_here(option: str) -> list[dict[str, Any]]:
    """What `blockrelay devices` finds, under the Python that has the devices' packages; `option` is named in errors."""
    python = WorkerSettings().gpu_python or sys.executable
    command = [python, "-P", "-m", "blockrelay_worker.offline.devices", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UsageError(f"BLOCKRELAY_GPU_PYTHON: {python} cannot be run: {error}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it says nothing"]
        raise UsageError(f"{option}: blockrelay devices ended with code {done.returncode}: {said[-1]}")
    return json.loads(done.stdout)["devices"]


def chosen(devices: Sequence[Mapping[str, Any]], count: int) -> tuple[str, ...]:
    """The first `count` GPUs of what was found. Raises UsageError, one line that says what there is."""
    gpus = [one for one in devices if one["kind"] == "gpu"]
    usable: list[Mapping[str, Any]] = []
    for one in gpus:
        # Several providers show the same card: the first that has one of a vendor has all of that vendor.
        provider = _provider(one)
        elsewhere = {_provider(other) for other in usable if one["vendor"] and other["vendor"] == one["vendor"]}
        if not one["problem"] and elsewhere <= {provider}:
            usable.append(one)
    ids = [str(one["id"]) for one in usable]
    if len(ids) < count:
        problems = "; ".join(f"{one['id']}: {one['problem']}" for one in gpus if one["problem"])
        found = ", ".join(ids) or f"no GPU that can be used ({problems or 'none was found'})"
        raise UsageError(f"--gpu-workers {count}: here is {found}; see blockrelay devices")
    return tuple(ids[:count])


def _provider(device: Mapping[str, Any]) -> str:
    return str(device["id"]).partition(":")[0]

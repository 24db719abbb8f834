"""Which GPUs of this machine `up --gpu-workers N` takes: the first N that `blockrelay devices` says can be used."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from blockrelay.errors import UsageError
from blockrelay.settings import WorkerSettings


def first_gpus(count: int) -> tuple[str, ...]:
    """Their ids. Raises UsageError where there are fewer."""
    python = WorkerSettings().gpu_python or sys.executable
    command = [python, "-P", "-m", "blockrelay_worker.offline.devices", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UsageError(f"BLOCKRELAY_GPU_PYTHON: {python} cannot be run: {error}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it says nothing"]
        raise UsageError(f"--gpu-workers: blockrelay devices ended with code {done.returncode}: {said[-1]}")
    return chosen(json.loads(done.stdout)["devices"], count)


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

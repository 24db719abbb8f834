"""NVIDIA's GPUs and their memory, as the driver lists them (`nvidia-smi`)."""

import csv
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blockrelay_worker.policy import NVIDIA_SMI_S

_FIELDS = "index,uuid,name,memory.total,memory.free,driver_version"


@dataclass(frozen=True, slots=True)
class NvidiaGpu:
    """One GPU of the driver's list. `uuid` is like GPU-8f.., the same after every start. Bytes are None where the
    driver does not say, for example for memory that a GPU shares with the host."""

    uuid: str
    name: str
    memory_bytes: int | None
    free_bytes: int | None
    driver: str


def nvidia_gpus(environment: Mapping[str, str]) -> list[NvidiaGpu]:
    """Returns the GPUs that CUDA shows to a process with this environment: number n of the list is `cuda:n`.

    The order is that of CUDA_VISIBLE_DEVICES, or by PCI bus id without it. Indexes in that variable count as with
    CUDA_DEVICE_ORDER=PCI_BUS_ID. The list is empty if `nvidia-smi` is missing, fails, or takes longer than NVIDIA_SMI_S
    seconds.
    """
    command = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=NVIDIA_SMI_S).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [
        row for row in csv.reader(answer.splitlines(), skipinitialspace=True) if len(row) == len(_FIELDS.split(","))
    ]
    chosen = visible([(row[0], row[1]) for row in rows], environment.get("CUDA_VISIBLE_DEVICES"))
    return [
        NvidiaGpu(uuid, name, _mebibytes(total), _mebibytes(free), driver)
        for _, uuid, name, total, free, driver in (rows[at] for at in chosen)
    ]


def visible(devices: Sequence[tuple[str, str]], variable: str | None) -> list[int]:
    """Returns the indexes of the (index, UUID) pairs that CUDA shows, in its order. `variable`: CUDA_VISIBLE_DEVICES,
    whose entries (an index, or the beginning of a UUID) count up to the first invalid one (unknown,
    ambiguous or repeated); None: all are shown."""
    if variable is None:
        return list(range(len(devices)))
    chosen: list[int] = []
    for word in (word.strip() for word in variable.split(",")):
        names = [at for at, (index, uuid) in enumerate(devices) if word == index or (word and uuid.startswith(word))]
        if len(names) != 1 or names[0] in chosen:
            break
        chosen += names
    return chosen


def _mebibytes(text: str) -> int | None:
    return int(text) << 20 if text.isdigit() else None

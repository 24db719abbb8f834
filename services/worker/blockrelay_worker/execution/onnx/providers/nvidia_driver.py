"""What NVIDIA's driver tells of its GPUs: which there are, and how much memory they have."""

import csv
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Seconds that the driver may take to tell.
_PATIENCE_S = 10.0
_FIELDS = "index,uuid,name,memory.total,memory.free,driver_version"


@dataclass(frozen=True, slots=True)
class NvidiaGpu:
    """`uuid` such as GPU-8f.., the same after every start. None: the driver does not tell (of memory that a GPU shares
    with the host, for example)."""

    uuid: str
    name: str
    memory_bytes: int | None
    free_bytes: int | None
    driver: str


def nvidia_gpus(environment: Mapping[str, str]) -> list[NvidiaGpu]:
    """Those that CUDA shows to a process with this environment, in its order, where CUDA_DEVICE_ORDER is PCI_BUS_ID:
    number n of the list is `cuda:n`. Empty where there is no driver."""
    command = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_PATIENCE_S).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [row for row in csv.reader(told.splitlines(), skipinitialspace=True) if len(row) == len(_FIELDS.split(","))]
    chosen = visible([(row[0], row[1]) for row in rows], environment.get("CUDA_VISIBLE_DEVICES"))
    return [
        NvidiaGpu(uuid, name, _mebibytes(total), _mebibytes(free), driver)
        for _, uuid, name, total, free, driver in (rows[at] for at in chosen)
    ]


def visible(devices: Sequence[tuple[str, str]], variable: str | None) -> list[int]:
    """Which of the (index, UUID) CUDA shows, and in which order: those that the variable names up to the first that is
    none, by index or the beginning of a UUID; all where it is not set."""
    if variable is None:
        return list(range(len(devices)))
    found: list[int] = []
    for word in (word.strip() for word in variable.split(",")):
        names = [at for at, (index, uuid) in enumerate(devices) if word == index or (word and uuid.startswith(word))]
        if len(names) != 1 or names[0] in found:
            break
        found += names
    return found


def _mebibytes(text: str) -> int | None:
    return int(text) << 20 if text.isdigit() else None

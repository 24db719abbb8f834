"""The part of a drill in which KV pages are short, so that requests swap, and swapped pages are damaged."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.precisions import kv_item_bytes
from blockrelay_launcher.drill.faults import Fault
from blockrelay_launcher.drill.parts.part import DrillPart
from blockrelay_launcher.drill.system import DrilledSystem, add_setting

#: Requests of the longest kind that the KV pages of a worker hold, of the whole model; about half of the load.
ROOM_FOR = 2
#: How much larger than its share the room of a stage is: plans with other borders make it larger.
STAGE_MARGIN = 1.5
#: Mean seconds between two damages.
EVERY_S = 0.5


def prepare_swaps(data: Path, workers: Sequence[str], folder: BlockFolder, *, longest: int, stages: int) -> None:
    """Gives workers of an `up` on the folder `data` few KV pages and a swap folder. Call it before `up` starts.

    Every second one has no shared memory, so that all pages of its preempted requests go to the disk. `workers` are the
    names that `up` gives them, `longest` is the number of tokens of the longest request.
    """
    model = folder.model
    bytes_per_token = model.layers * 2 * model.kv_heads * model.head_dim * kv_item_bytes(folder.manifest.precisions)
    share = min(1.0, STAGE_MARGIN / stages)
    for number, name in enumerate(workers):
        add_setting(data, name, f"BLOCKRELAY_KV_BYTES={int(ROOM_FOR * longest * bytes_per_token * share)}")
        add_setting(data, name, f"BLOCKRELAY_SWAP_FOLDER={_folder(data)}")
        if number % 2:
            add_setting(data, name, "BLOCKRELAY_PAGE_STORE_BYTES=0")


@dataclass(slots=True)
class SwapDamages(DrillPart):
    """The part that damages or removes pages in the swap folder, one after the other."""

    system: DrilledSystem
    rng: Random

    def _run(self) -> None:
        while not self._over.wait(EVERY_S * self.rng.uniform(0.5, 1.5)):
            files = sorted(path for path in _folder(self.system.data).glob("*.*-*") if path.is_file())
            if files:
                with suppress(OSError):  # a worker has read it
                    self.rng.choice(_DAMAGES)(self.rng.choice(files), self.rng)
                    self.done.append(Fault(at=time.monotonic(), kind="swap", target="worker"))


def _flip(path: Path, rng: Random) -> None:
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        place = rng.randrange(size)
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))


def _cut(path: Path, rng: Random) -> None:
    with path.open("r+b") as file:
        file.truncate(rng.randrange(file.seek(0, 2)))


def _remove(path: Path, rng: Random) -> None:
    path.unlink()


def _exchange(path: Path, rng: Random) -> None:
    """Gives a page the content of another one."""
    other = rng.choice(sorted(path.parent.glob("*.*-*")))
    path.write_bytes(other.read_bytes())


_DAMAGES: Final[Sequence[Callable[[Path, Random], None]]] = (_flip, _cut, _remove, _exchange)


def _folder(data: Path) -> Path:
    """Returns the swap folder of an `up` on the folder `data`."""
    return data / "swap"

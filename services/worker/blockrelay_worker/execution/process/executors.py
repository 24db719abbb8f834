"""One device, in a process of its own, for as many workers as it has stages: begun here, and anew where it was lost."""

import threading
import time
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.block_folder.model import Precision
from blockrelay.errors import UsageError
from blockrelay.protocol.plan import Device
from blockrelay_worker.execution.device_memory import DeviceMemory
from blockrelay_worker.execution.onnx.tries import TRIES
from blockrelay_worker.execution.process.device_process import CHILD, CLOSED, DeviceProcess
from blockrelay_worker.execution.process.frames import Message
from blockrelay_worker.execution.process.renewal import in_quarantine, may_be_renewed, usable_in_s
from blockrelay_worker.execution.process.sharing import Sharing
from blockrelay_worker.execution.process.stage import DeviceStage

#: How long a device may take to load a stage: cold shaders take most of a minute each. Seconds.
LOAD_LIMIT_S = 600.0


class DeviceExecutors:
    """Makes stages on one device. Any thread may use it: where the process was lost, one of them begins a new one, and
    a loss counts once however many stages it was of."""

    device: ClassVar[Device] = "gpu"
    varies: ClassVar[bool] = True

    def __init__(
        self,
        device: str,
        folder: BlockFolder,
        *,
        python: str,
        limit_s: float,
        per_block: bool = False,
        cache: Path | None = None,
        eager: bool = False,
        budget_bytes: int | None = None,
        workers: int = 1,
        threads: int = 1,
        quarantine: bool = True,
        warm: tuple[int | None, int | None, bool] = (None, None, False),
        tries: int = TRIES.most,
        module: str = CHILD,
    ) -> None:
        """Raises UsageError where this device will never run stages of this folder; DeviceLost for what may pass.

        A step may take `limit_s`. `per_block` as of OnnxStage, `cache`, `eager`, `threads`, `quarantine`, `warm` and
        `tries` as of Gpu, `python` and `module` as of DeviceProcess. All stages of all `workers` may use `budget_bytes`
        of the device; None: what it says itself.
        """
        self.name, self._folder, self._limit_s = device, folder, limit_s
        self._how = {
            "per_block": per_block,
            "cache": None if cache is None else str(cache.absolute()),
            "eager": eager,
            "threads": threads,
            "warm": warm,
            "tries": (tries, limit_s),
            "budget": budget_bytes,
        }
        self._quarantine = quarantine
        self.sharing = Sharing(workers)
        self._begin = partial(DeviceProcess, device, python=python, module=module)
        self._lock = threading.RLock()
        self._losses: list[float] = []
        #: Why it was lost the last time.
        self.last_loss = ""
        self._forgiven: float | None = None  # the moment of the loss that no longer counts
        self._renewed: float | None = None
        self._begun_again: list[str] = []
        self._told_budget = budget_bytes
        opened = self._begun()
        self._numerics, self._memory = str(opened["numerics"]), DeviceMemory(**opened["memory"])

    @staticmethod
    def serves(device: Device, precisions: Collection[Precision]) -> bool:
        """All there are: weights that a device does not know are widened."""
        return device == "gpu"

    def numerics_id(self, manifest: Manifest) -> str:
        """As the process has told of its folder."""
        assert manifest.model_hash == self._folder.manifest.model_hash, "it was opened for another folder"
        return self._numerics

    def memory(self, folder: BlockFolder) -> DeviceMemory:
        """As it was before the first stage was loaded."""
        return self._memory

    @property
    def budget_bytes(self) -> int | None:
        """What weights and pages of all stages may take; None where nobody has said, nor the device."""
        return self._told_budget or self._memory.budget_bytes

    def usable_in_s(self) -> float:
        """Seconds until `load` may be tried; 0.0 at once. A device that was lost is left alone for a while."""
        with self._lock:
            self._count_loss()
            return usable_in_s(self._losses if self._quarantine else self._losses[-1:], time.monotonic())

    @property
    def in_quarantine(self) -> bool:
        """It was lost too often of late."""
        return self._quarantine and in_quarantine(self._losses)

    @property
    def losses(self) -> int:
        """How often it was lost."""
        return len(self._losses)

    def forget_losses(self) -> None:
        """Somebody has looked after the device: it may be tried at once, and is not in quarantine."""
        with self._lock:
            self._forgiven = self._losses[-1] if self._losses else None
            self._losses.clear()

    def load(self, folder: BlockFolder, first_block: int, last_block: int, *, pages: int) -> DeviceStage:
        """See `Executors.load`; in a new process where the last one was lost. Returns when others that are being loaded
        are there too, or have failed."""
        with self.sharing.loading():
            process = self._there()
            fields = {"first": first_block, "last": last_block, "pages": pages, "budget": self.budget_bytes}
            loaded = process.ask(Message("load", fields), limit_s=LOAD_LIMIT_S).fields
        process.check()
        return DeviceStage(
            process,
            folder,
            first_block,
            last_block,
            loaded,
            numerics_id=self._numerics,
            limit_s=self._limit_s,
        )

    def begun_again(self) -> list[str]:
        """Why its process was begun anew each time (lost, slow) since somebody asked."""
        with self._lock:
            found, self._begun_again = self._begun_again, []
            return found

    @property
    def may_be_renewed(self) -> bool:
        """Its process was not renewed of late."""
        return may_be_renewed(self._renewed, time.monotonic())

    def renew(self) -> None:
        """End the process, which has done nothing wrong: the next stage is loaded in a new one, at once. Its stages are
        lost."""
        with self._lock:
            self._renewed = time.monotonic()
            self._process.retire()

    def abandon(self) -> None:
        """End the process at once, also where a stage is being loaded: that raises DeviceLost."""
        self._process.abandon()

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _there(self) -> DeviceProcess:
        """The process: a new one, if it is lost."""
        with self._lock:
            self._count_loss()
            lost = self._process.lost
            if lost is not None:
                opened = self._begun()
                self._begun_again.append("slow" if lost.reason == CLOSED else "lost")
                if (now := opened["numerics"]) != self._numerics:
                    raise UsageError(f"{self.name} computes by {now} now, and by {self._numerics} before: start again")
            return self._process

    def _begun(self) -> Mapping[str, Any]:
        """Begin a process, and have it open the folder: what it has told of that. One that is lost before it has opened
        it is a loss like another."""
        process = self._process = self._begin()
        folder = str(self._folder.root.absolute())
        fields = {"device": self.name, "folder": folder, **self._how}
        try:
            return process.ask(Message("open", fields), limit_s=LOAD_LIMIT_S).fields
        except BaseException:
            process.close()
            raise

    def _count_loss(self) -> None:
        lost = self._process.lost
        if lost is None or lost.reason == CLOSED or lost.moment in (self._forgiven, *self._losses[-1:]):
            return
        self._losses.append(lost.moment)
        self.last_loss = lost.reason

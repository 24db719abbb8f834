"""One device, in a process of its own, for as many workers as it has stages: begun here, and anew where it was lost."""

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.block_folder.model import Precision
from blockrelay.errors import DeviceFailed, DeviceLost, KnownAnswerMismatch, UsageError
from blockrelay.protocol.plan import Device
from blockrelay_worker.execution.device_memory import DeviceMemory
from blockrelay_worker.execution.onnx.tries import TRIES, what_next
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
        self.own, self._folder, self._limit_s = device, folder, limit_s
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
        self._begin = partial(DeviceProcess, python=python, module=module)
        self._lock = threading.RLock()
        self._renewed: float | None = None
        self._begun_again: list[str] = []
        self._told_budget = budget_bytes
        self._unable = ""
        self._slow = False  # its process was ended for that
        self._process, self._now = self._opened(device)
        self._home = self._now

    @property
    def name(self) -> str:
        """The device that computes now: the one that this was made for, unless it has moved."""
        return self._now.name

    @property
    def unable(self) -> str:
        """Why its device cannot do its work, so that another one of the host may be asked; empty: it can."""
        with self._lock:
            self._count_loss()
            return self._unable

    @property
    def card(self) -> str:
        """As of Provider."""
        return self._now.card

    @property
    def last_loss(self) -> str:
        """Why it was lost the last time."""
        return self._now.last_loss

    @staticmethod
    def serves(device: Device, precisions: Collection[Precision]) -> bool:
        """All there are: weights that a device does not know are widened."""
        return device == "gpu"

    def numerics_id(self, manifest: Manifest) -> str:
        """As the process has told of its folder."""
        assert manifest.model_hash == self._folder.manifest.model_hash, "it was opened for another folder"
        return self._now.numerics

    def memory(self, folder: BlockFolder) -> DeviceMemory:
        """As it was before the first stage was loaded."""
        return self._now.memory

    @property
    def budget_bytes(self) -> int | None:
        """What weights and pages of all stages may take; None where nobody has said, nor the device."""
        own, told = self._now.memory.budget_bytes, self._told_budget
        if told is not None and own is not None and self._now is not self._home:
            return min(told, own)  # somebody has said it of another device
        return told or own

    def usable_in_s(self) -> float:
        """Seconds until `load` may be tried; 0.0 at once. A device that was lost is left alone for a while."""
        with self._lock:
            self._count_loss()
            losses = self._now.losses
            return usable_in_s(losses if self._quarantine else losses[-1:], time.monotonic())

    @property
    def in_quarantine(self) -> bool:
        """It was lost too often of late."""
        return self._quarantine and in_quarantine(self._now.losses)

    @property
    def losses(self) -> int:
        """How often it was lost."""
        return len(self._now.losses)

    def forget_losses(self) -> None:
        """Somebody has looked after the device: it may be tried at once, and is not in quarantine."""
        with self._lock:
            now = self._now
            now.forgiven = now.losses[-1] if now.losses else None
            now.losses.clear()

    def load(self, folder: BlockFolder, first_block: int, last_block: int, *, pages: int) -> DeviceStage:
        """See `Executors.load`; in a new process where the last one was lost. Returns when others that are being loaded
        are there too, or have failed. A GPU on which a stage cannot be made now is lost, with its other stages, and so
        is one that computes wrong numbers, as one whose canary is wrong; a CPU raises what it was."""
        with self.sharing.loading():
            fields = {"first": first_block, "last": last_block, "pages": pages, "budget": self.budget_bytes}
            try:
                process, numerics = self._there()
                loaded = process.ask(Message("load", fields), limit_s=LOAD_LIMIT_S).fields
            except (DeviceFailed, KnownAnswerMismatch) as error:
                if not self._quarantine:
                    raise
                raise self._process.give_up(_lost_by(error)) from error
        process.check()
        return DeviceStage(
            process,
            folder,
            first_block,
            last_block,
            loaded,
            numerics_id=numerics,
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
            self._renewed, self._slow = time.monotonic(), True
            self._process.retire()

    def abandon(self) -> None:
        """End the process at once, also where a stage is being loaded: that raises DeviceLost."""
        self._process.abandon()

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def give_up(self, why: str) -> DeviceLost:
        """The device will not do this work: it is lost, with all of its stages. The loss."""
        return self._process.give_up(DeviceLost(why, reason="refused", code="INTERNAL"))

    def move_to(self, device: str) -> None:
        """Compute on another device from now on, by another numerics id: the process of the one before is lost. Raises
        as making this does; then `move_to` another one, or `go_home`."""
        with self._lock:
            self._count_loss()
            self._process.close()
            try:
                self._process, self._now = self._opened(device)
            except BaseException:
                self._forgive(self._now)
                raise
            self._unable, self._slow = "", False

    def go_home(self) -> None:
        """Compute on the own device again, in a new process, when that is usable."""
        with self._lock:
            if self._now is not self._home:
                self._process.close()
                self._now = self._home
                self._forgive(self._home)
            self._unable = ""

    def _forgive(self, device: "_Opened") -> None:
        """That the last process has ended is no loss of this device: it was of another one."""
        if self._process.lost is not None:
            device.forgiven = self._process.lost.moment

    def _there(self) -> tuple[DeviceProcess, str]:
        """The process, a new one if it is lost, and by which numerics id it computes."""
        with self._lock:
            self._count_loss()
            lost = self._process.lost
            if lost is not None:
                self._process, opened = self._opened(self.name)
                self._begun_again.append("slow" if self._slow else "lost")
                self._slow = False
                if opened.numerics != self._now.numerics:
                    before = self._now.numerics
                    raise UsageError(
                        f"{self.name} computes by {opened.numerics} now, and by {before} before: start again"
                    )
            return self._process, self._now.numerics

    def _opened(self, device: str) -> tuple[DeviceProcess, "_Opened"]:
        """A process that has opened the folder on the device, and what it has told of that."""
        process = self._process = self._begin(device)
        folder = str(self._folder.root.absolute())
        fields = {"device": device, "folder": folder, **self._how}
        try:
            told = process.ask(Message("open", fields), limit_s=LOAD_LIMIT_S).fields
        except DeviceFailed as failed:
            process.give_up(_lost_by(failed))
            raise
        except BaseException:
            process.close()
            raise
        memory = DeviceMemory(**told["memory"])
        return process, _Opened(device, str(told["card"]), str(told["numerics"]), memory)

    def _count_loss(self) -> None:
        lost, now = self._process.lost, self._now
        if lost is None or lost.reason == CLOSED or lost.moment in (now.forgiven, *now.losses[-1:]):
            return
        now.losses.append(lost.moment)
        now.last_loss = lost.reason
        if what_next(lost.reason, (), TRIES, others=True) == "next_device":
            self._unable = lost.reason


@dataclass(slots=True)
class _Opened:
    """A device, what its process has told of it, and the moments when it was lost; `forgiven`: the last one that counts
    no more."""

    name: str
    card: str
    numerics: str
    memory: DeviceMemory
    losses: list[float] = field(default_factory=list[float])
    last_loss: str = ""
    forgiven: float | None = None


def _lost_by(error: DeviceFailed | KnownAnswerMismatch) -> DeviceLost:
    """The loss of a device that could not make a stage, or whose stage gave wrong known answers."""
    if isinstance(error, KnownAnswerMismatch):
        return DeviceLost(str(error), reason="canary", code="INTERNAL", block=error.block)
    return DeviceLost(str(error), reason=error.reason, code=error.code, block=error.block)

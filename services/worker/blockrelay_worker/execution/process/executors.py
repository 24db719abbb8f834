"""The executors of one device in a process of its own, for all workers with a stage there; a lost process is
replaced."""

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.errors import DeviceFailed, DeviceLost, KnownAnswerMismatch, UsageError
from blockrelay.observability.logs import get
from blockrelay_worker.execution.device_memory import DeviceMemory
from blockrelay_worker.execution.onnx.tries import TRIES, what_next
from blockrelay_worker.execution.process.device_process import CHILD, CLOSED, DeviceProcess
from blockrelay_worker.execution.process.frames import Message
from blockrelay_worker.execution.process.renewal import in_quarantine, may_be_renewed, usable_in_s
from blockrelay_worker.execution.process.sharing import Sharing
from blockrelay_worker.execution.process.stage import DeviceStage
from blockrelay_worker.policy import LOAD_LIMIT_S


@dataclass(frozen=True, slots=True)
class Gpu:
    """Options of the process that computes on one device."""

    device: str
    """Name such as webgpu:0."""
    step_limit_s: float
    """Longest time that a step may take, in seconds."""
    python: str = sys.executable
    """Path of the Python that has the device's packages."""
    per_block: bool = False
    """True if blocks run one by one, so that each can be measured."""
    cache: Path | None = None
    """Folder of optimised graphs; None: they are not kept."""
    eager: bool = False
    """True if no decode step is recorded."""
    budget_bytes: int | None = None
    """Device memory that may be used; None: the default share of what is free."""
    stages: int = 1
    """Number of workers, each with a stage of its own on the device."""
    threads: int = 1
    """CPU threads for a model that is served as its own ONNX files."""
    quarantine: bool = True
    """True if a device that was lost too often is left unused for a while."""
    warm: tuple[int | None, int | None, bool] = (None, None, False)
    """Limits of warm ONNX sessions: number and bytes (None: no limit), and whether free memory limits them too."""
    tries: int = TRIES.max_tries
    """Most tries to make or run a session."""


class DeviceExecutors:
    """Makes stages on one device. Implements `loader.Executors`. Any thread may use it. If the process was lost, one of
    them starts a new one; a loss counts once, however many stages it took.

    `usable_in_s`, `unable`, `load` and `move_to` count a new loss. Until one of them is called, `losses`, `last_loss`
    and `in_quarantine` do not include it.
    """

    nondeterministic: ClassVar[bool] = True

    def __init__(
        self, folder: BlockFolder, gpu: Gpu, *, others: Sequence[BlockFolder] = (), module: str = CHILD
    ) -> None:
        """Starts the process, `python -m module`, and opens `folder` on the device, and `others`: the same model in
        other precisions. Those of `others` that the device refuses are logged, and not served (`serves`).

        Raises UsageError where this device will never run stages of `folder`, and BlockFolderError for a folder that
        the process cannot open. Raises KnownAnswerMismatch for a device with wrong attention, and DeviceLost or
        DeviceFailed for what may pass. Raises OSError if `gpu.python` cannot be started.
        """
        self.own, self._folders, self._gpu = gpu.device, (folder, *others), gpu
        self.sharing = Sharing(gpu.stages)
        self._begin = partial(DeviceProcess, python=gpu.python, module=module)
        self._lock = threading.RLock()
        self._renewed: float | None = None
        self._restart_reasons: list[str] = []
        self._unable = ""
        self._slow = False  # the process was ended because it was slow
        self._process, self._now = self._opened(gpu.device)
        self._home = self._now

    @property
    def name(self) -> str:
        """The device that computes now: the one given at construction, unless `move_to` chose another one."""
        return self._now.name

    @property
    def unable(self) -> str:
        """Reason of the loss because of which another device of the host may be tried; empty if there is none."""
        with self._lock:
            self._count_loss()
            return self._unable

    @property
    def card(self) -> str:
        """The card's name, which is the same in all workers of this host; it is that of `Provider.card`."""
        return self._now.card

    @property
    def last_loss(self) -> str:
        """The reason of the last loss of the device; empty before the first."""
        return self._now.last_loss

    def serves(self, folder: BlockFolder) -> bool:
        """Returns whether the device that computes now can run stages of a folder given at construction."""
        return folder.manifest.model_hash in self._now.folders

    def numerics_id(self, manifest: Manifest) -> str:
        """Returns the numerics id that the process computed for a folder. Raises UsageError for a folder that was not
        opened on this device."""
        return self._of(manifest).numerics

    def memory(self, folder: BlockFolder) -> DeviceMemory:
        """Returns the memory that stages of a folder take, and the budget of the device as it was before the first
        stage was loaded. Raises UsageError for a folder that was not opened on this device."""
        return self._of(folder.manifest).memory

    def _of(self, manifest: Manifest) -> "_Folder":
        now = self._now
        if (found := now.folders.get(manifest.model_hash)) is None:
            raise UsageError(
                f"{now.name} was not opened for {manifest.precision} ({manifest.model_hash[:16]}): start the worker "
                "again"
            )
        return found

    @property
    def budget_bytes(self) -> int | None:
        """Bytes that weights and KV pages of all stages may take; None where neither an option nor the device sets a
        limit. The option goes before the device's limit; on another device the smaller one counts."""
        own, limit = self._of(self._folders[0].manifest).memory.budget_bytes, self._gpu.budget_bytes
        if limit is not None and own is not None and self._now is not self._home:
            return min(limit, own)  # the limit was set for another device
        return limit or own

    def usable_in_s(self) -> float:
        """Returns the seconds until `load` may be tried; 0.0 at once. A device that was lost is left alone for a
        while."""
        with self._lock:
            self._count_loss()
            losses = self._now.losses
            return usable_in_s(losses if self._gpu.quarantine else losses[-1:], time.monotonic())

    @property
    def in_quarantine(self) -> bool:
        """True if the last three losses came within ten minutes: see `renewal`. Never true without `quarantine`."""
        return self._gpu.quarantine and in_quarantine(self._now.losses)

    @property
    def losses(self) -> int:
        """How often the device was lost, since the start or since `forget_losses`."""
        return len(self._now.losses)

    def forget_losses(self) -> None:
        """Ends the quarantine: an operator has looked after the device, which may be tried at once."""
        with self._lock:
            now = self._now
            now.forgiven = now.losses[-1] if now.losses else None
            now.losses.clear()

    def load(self, folder: BlockFolder, first_block: int, last_block: int, *, pages: int) -> DeviceStage:
        """Loads a stage, in a new process where the last one was lost: see `Executors.load`. Returns when all stages
        that are being loaded at the same time are there, or have failed.

        Raises DeviceLost for a GPU on which the stage cannot be made now or computes wrong numbers: its other stages
        are lost too. With `quarantine` off (a CPU) the DeviceFailed or KnownAnswerMismatch is raised as it is. Raises
        BlockFolderError for blocks that the folder lacks, and UsageError for what this device will never do, or if a
        new process has another numerics id. Raises OSError if a new process cannot be started.
        """
        with self.sharing.loading():
            blocks = {"folder": str(folder.root.absolute()), "first": first_block, "last": last_block}
            fields = {**blocks, "pages": pages, "budget": self.budget_bytes}
            try:
                process, numerics = self._there(folder.manifest)
                loaded = process.ask(Message("load", fields), limit_s=LOAD_LIMIT_S).fields
            except (DeviceFailed, KnownAnswerMismatch) as error:
                if not self._gpu.quarantine:
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
            limit_s=self._gpu.step_limit_s,
        )

    def bytes_to_load(self, manifest: Manifest, first_block: int, last_block: int) -> int:
        """Returns the bytes of the files of these blocks. Which of them the device has, its process alone knows."""
        return sum(manifest.block_file(index).bytes for index in range(first_block, last_block + 1))

    def restart_reasons(self) -> list[str]:
        """Returns why the process was replaced each time (`lost`, `slow`) since the last call."""
        with self._lock:
            reasons, self._restart_reasons = self._restart_reasons, []
            return reasons

    @property
    def may_be_renewed(self) -> bool:
        """True if the process was not renewed in the last hour."""
        return may_be_renewed(self._renewed, time.monotonic())

    def renew(self) -> None:
        """Ends a process that has failed in nothing, after its current request: the next stage is loaded in a new one,
        at once. Its stages are lost."""
        with self._lock:
            self._renewed, self._slow = time.monotonic(), True
            self._process.retire()

    def abandon(self) -> None:
        """Kills the process at once. A `load` that is under way raises DeviceLost."""
        self._process.abandon()

    def close(self) -> None:
        """Ends the process. No thread may be asking it anything."""
        self._process.close()

    def give_up(self, why: str) -> DeviceLost:
        """Declares the device lost (reason `refused`), with all of its stages, after its current request. Returns the
        loss, or an earlier one."""
        return self._process.give_up(DeviceLost(why, reason="refused", code="INTERNAL"))

    def move_to(self, device: str) -> None:
        """Computes on another device from now on, with another numerics id; closes the process of the one before.

        Raises UsageError or BlockFolderError if that device never runs the folder with which the worker started,
        KnownAnswerMismatch for wrong attention, DeviceLost or DeviceFailed for what may pass, and OSError if its
        process cannot be started. Then call `move_to` with another device, or `go_home`.
        """
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
        """Goes back to the device given at construction. `load` starts its process when that device is usable."""
        with self._lock:
            if self._now is not self._home:
                self._process.close()
                self._now = self._home
                self._forgive(self._home)
            self._unable = ""

    def _forgive(self, device: "_Opened") -> None:
        """Marks the end of the last process as no loss of `device`: it belonged to another one."""
        if self._process.lost is not None:
            device.forgiven = self._process.lost.moment

    def _there(self, manifest: Manifest) -> tuple[DeviceProcess, str]:
        """Returns the process, a new one if it was lost, and its numerics id for a folder. Raises UsageError if a new
        process has another id for any folder, or refuses this one. What it refuses is not served any more."""
        with self._lock:
            self._count_loss()
            lost = self._process.lost
            if lost is not None:
                self._process, opened = self._opened(self.name)
                self._restart_reasons.append("slow" if self._slow else "lost")
                self._slow = False
                before = self._now.folders
                for key, folder in opened.folders.items():
                    if key in before and folder.numerics != before[key].numerics:
                        raise UsageError(
                            f"{self.name} has the numerics id {folder.numerics} now and had {before[key].numerics} "
                            "before: start the worker again"
                        )
                self._now.folders = {key: before.get(key, folder) for key, folder in opened.folders.items()}
            return self._process, self.numerics_id(manifest)

    def _opened(self, device: str) -> tuple[DeviceProcess, "_Opened"]:
        """Returns a process that has opened the folders on `device`, and its figures."""
        process = self._process = self._begin(device)
        gpu = self._gpu
        fields = {
            "device": device,
            "folders": [str(folder.root.absolute()) for folder in self._folders],
            "per_block": gpu.per_block,
            "cache": None if gpu.cache is None else str(gpu.cache.absolute()),
            "eager": gpu.eager,
            "threads": gpu.threads,
            "warm": gpu.warm,
            "tries": (gpu.tries, gpu.step_limit_s),
            "budget": gpu.budget_bytes,
        }
        try:
            answer = process.ask(Message("open", fields), limit_s=LOAD_LIMIT_S).fields
        except DeviceFailed as failed:
            process.give_up(_lost_by(failed))
            raise
        except BaseException:
            process.close()
            raise
        found: dict[str, _Folder] = {}
        for folder, about in zip(self._folders, answer["folders"], strict=True):
            if refusal := about.get("refused"):
                get().error("FOLDER_REFUSED", device=device, folder=folder.model_key, error=refusal)
            else:
                memory = DeviceMemory(**about["memory"])
                found[folder.manifest.model_hash] = _Folder(about["numerics"], memory)
        return process, _Opened(device, str(answer["card"]), found)

    def _count_loss(self) -> None:
        """Notes the loss of the process, once, and whether another device may take its work."""
        lost, now = self._process.lost, self._now
        if lost is None or lost.reason == CLOSED or lost.moment in (now.forgiven, *now.losses[-1:]):
            return
        now.losses.append(lost.moment)
        now.last_loss = lost.reason
        if what_next(lost.reason, (), TRIES, others=True) == "next_device":
            self._unable = lost.reason


@dataclass(frozen=True, slots=True)
class _Folder:
    """The numerics id of a folder's stages on a device, and the memory that they take there."""

    numerics: str
    memory: DeviceMemory


@dataclass(slots=True)
class _Opened:
    """A device, the figures that its process sent when it opened the folders (by their model's hash), and the moments
    of its losses (time.monotonic). `forgiven` is the last loss that no longer counts."""

    name: str
    card: str
    folders: Mapping[str, _Folder]
    losses: list[float] = field(default_factory=list[float])
    last_loss: str = ""
    forgiven: float | None = None


def _lost_by(error: DeviceFailed | KnownAnswerMismatch) -> DeviceLost:
    """The loss of a device that could not make a stage, or whose stage gave wrong known answers."""
    if isinstance(error, KnownAnswerMismatch):
        return DeviceLost(str(error), reason="canary", code="INTERNAL", block=error.block)
    return DeviceLost(str(error), reason=error.reason, code=error.code, block=error.block)

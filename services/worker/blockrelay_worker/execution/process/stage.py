"""Stages that run in the process of a device: the worker's side of them."""

import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.block_folder.model import Precision
from blockrelay.errors import UsageError
from blockrelay.protocol.capabilities import Capabilities
from blockrelay.protocol.plan import Device
from blockrelay_worker.execution.batch import Batch, StageOutput, check_segments, hidden_of, tokens_of
from blockrelay_worker.execution.device_memory import DeviceMemory
from blockrelay_worker.execution.executor import PageContent
from blockrelay_worker.execution.page_layout import PageLayout, layout_of
from blockrelay_worker.execution.page_pool import PagePool
from blockrelay_worker.execution.process.device_process import CHILD, CLOSED, DeviceProcess
from blockrelay_worker.execution.process.figures import Figures
from blockrelay_worker.execution.process.frames import Message
from blockrelay_worker.execution.process.logit_rows import packed_needs, unpacked_rows
from blockrelay_worker.execution.process.renewal import in_quarantine, may_be_renewed, usable_in_s
from blockrelay_worker.execution.process.step_drift import StepDrift, shape_of
from blockrelay_worker.kernels.specification import PAGE

#: How long a device may take to load a stage: cold shaders take most of a minute each. Seconds.
LOAD_LIMIT_S = 600.0


class DeviceStage:
    """Blocks `first_block..last_block` in the process of a device. Who has which page is known here, what is in it
    there; a stage whose process is lost is lost with all its pages."""

    def __init__(
        self,
        process: DeviceProcess,
        folder: BlockFolder,
        first_block: int,
        last_block: int,
        loaded: Mapping[str, Any],
        *,
        numerics_id: str,
        limit_s: float,
    ) -> None:
        """`loaded` is what the process said of it; a step may take `limit_s`."""
        self.folder, self.first_block, self.last_block = folder, first_block, last_block
        self.layout = layout_of(folder, first_block, last_block)
        self.pool = PagePool(self.layout, loaded["pages"])
        self.details: Mapping[str, str] = {"device": process.device, **loaded["details"]}
        self.capabilities = Capabilities(
            exact=False,
            ragged=True,
            max_rows=loaded["max_rows"],
            max_sequences=loaded["max_sequences"],
            precision=folder.manifest.precision,
            numerics_id=numerics_id,
            kv_tokens=loaded["pages"] * PAGE,
        )
        self._process, self._stage, self._limit_s = process, loaded["stage"], limit_s
        self.drift, self.figures = StepDrift(), Figures()
        self.figures.hear(loaded["figures"])

    @property
    def usable(self) -> bool:
        return self._process.lost is None

    def check(self) -> None:
        """Raises DeviceLost when it is not usable any more."""
        self._process.check()

    @property
    def takes_tokens(self) -> bool:
        """It has block 1."""
        return self.first_block == 1

    @property
    def gives_logits(self) -> bool:
        """It has the last block."""
        return self.last_block == self.folder.model.blocks

    def run(self, batch: Batch) -> StageOutput:
        """See `Executor.run`."""
        model = self.folder.model
        pages = self.pool.pages if self.layout.layers > 0 else 0
        count = check_segments(batch.segments, limit=model.max_position, pages=pages)
        rows: NDArray[Any] = (tokens_of if self.takes_tokens else hidden_of)(batch, count, model)
        segments = [(s.rows, s.first_position, list(s.pages) if pages else []) for s in batch.segments]
        asked = {"segments": segments, "wanted": list(batch.wanted), "needs": packed_needs(batch.needs)}
        answer = self._ask("run", asked, [rows])
        self.figures.hear(answer.fields["figures"])
        self.drift.add(shape_of(batch.segments), sum(answer.fields["seconds"].values()))
        chosen = answer.fields.get("rows")
        return StageOutput(
            hidden=None if self.gives_logits else answer.arrays[0],
            logits=answer.arrays[0] if self.gives_logits and chosen is None else None,
            rows=None if chosen is None else unpacked_rows(chosen, answer.arrays),
            not_finite=tuple(answer.fields["not_finite"]),
            seconds=dict(answer.fields["seconds"]),
            estimated=answer.fields["estimated"],
        )

    def export_pages(self, pages: Sequence[int]) -> list[PageContent]:
        """Copies."""
        if not pages or self.layout.layers < 1:
            return [[] for _ in pages]
        halves = self._ask("export", {"pages": list(pages)}).arrays
        pairs = list(zip(halves[::2], halves[1::2], strict=True))
        layers = self.layout.layers
        return [pairs[at * layers : (at + 1) * layers] for at in range(len(pages))]

    def import_pages(self, pages: Sequence[int], contents: Sequence[PageContent]) -> None:
        """See `PageOwner.import_pages`."""
        if pages and self.layout.layers > 0:
            halves = [np.asarray(half) for content in contents for layer in content for half in layer]
            self._ask("import", {"pages": list(pages)}, halves)

    def canary(self) -> None:
        """Compute what is known. Raises DeviceLost (reason `canary`) where that is wrong, and what `run` raises."""
        self._ask("canary")

    def clean_up(self) -> None:
        """Have the device give back whatever it keeps for later steps."""
        self.drift.was_cleaned()
        self._ask("clean_up")

    def close(self) -> None:
        """Give back what it holds on the device, if that is still there."""
        if self._process.lost is None:
            self._ask("close")

    def _ask(self, kind: str, fields: Mapping[str, Any] | None = None, arrays: Sequence[NDArray[Any]] = ()) -> Message:
        return self._process.ask(Message(kind, {"stage": self._stage, **(fields or {})}, arrays), limit_s=self._limit_s)


class DeviceExecutors:
    """Makes stages on one device, which has a process of its own: it is begun here, and anew where it was lost."""

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
        module: str = CHILD,
    ) -> None:
        """Raises UsageError where this device will never run stages of this folder; DeviceLost for what may pass.

        A step may take `limit_s`. `per_block` as of OnnxStage, `cache` and `eager` as of Gpu, `python` and `module` as
        of DeviceProcess.
        """
        self.name, self._folder, self._limit_s = device, folder, limit_s
        self._how = {"per_block": per_block, "cache": None if cache is None else str(cache.absolute()), "eager": eager}
        self._begin = partial(DeviceProcess, device, python=python, module=module)
        self._losses: list[float] = []
        #: Why it was lost the last time.
        self.last_loss = ""
        self._forgiven: float | None = None  # the moment of the loss that no longer counts
        self._renewed: float | None = None
        self._process, opened = self._begun()
        self._numerics, self._layer_page_bytes = str(opened["numerics"]), int(opened["layer_page_bytes"])
        self._memory = DeviceMemory(**opened["memory"])

    @staticmethod
    def serves(device: Device, precisions: Collection[Precision]) -> bool:
        """All there are: weights that a device does not know are widened."""
        return device == "gpu"

    def numerics_id(self, manifest: Manifest) -> str:
        """As the process has told of its folder."""
        assert manifest.model_hash == self._folder.manifest.model_hash, "it was opened for another folder"
        return self._numerics

    def layout(self, folder: BlockFolder, first_block: int, last_block: int) -> PageLayout:
        return layout_of(folder, first_block, last_block)

    def page_bytes(self, layout: PageLayout) -> int:
        return layout.layers * self._layer_page_bytes

    def memory(self, folder: BlockFolder) -> DeviceMemory:
        """As it was before the first stage was loaded."""
        return self._memory

    def usable_in_s(self) -> float:
        """Seconds until `load` may be tried; 0.0 at once. A device that was lost is left alone for a while."""
        self._count_loss()
        return usable_in_s(self._losses, time.monotonic())

    @property
    def in_quarantine(self) -> bool:
        """It was lost too often of late."""
        return in_quarantine(self._losses)

    @property
    def losses(self) -> int:
        """How often it was lost."""
        return len(self._losses)

    def forget_losses(self) -> None:
        """Somebody has looked after the device: it may be tried at once, and is not in quarantine."""
        self._forgiven = self._losses[-1] if self._losses else None
        self._losses.clear()

    def load(self, folder: BlockFolder, first_block: int, last_block: int, *, pages: int) -> DeviceStage:
        """See `Executors.load`; in a new process where the last one was lost."""
        self._count_loss()
        if self._process.lost is not None:
            self._process, opened = self._begun()
            if (now := opened["numerics"]) != self._numerics:
                raise UsageError(f"{self.name} computes by {now} now, and by {self._numerics} before: start again")
        fields = {"first": first_block, "last": last_block, "pages": pages}
        loaded = self._process.ask(Message("load", fields), limit_s=LOAD_LIMIT_S).fields
        return DeviceStage(
            self._process,
            folder,
            first_block,
            last_block,
            loaded,
            numerics_id=self._numerics,
            limit_s=self._limit_s,
        )

    @property
    def may_be_renewed(self) -> bool:
        """Its process was not renewed of late."""
        return may_be_renewed(self._renewed, time.monotonic())

    def renew(self) -> None:
        """End the process, which has done nothing wrong: the next stage is loaded in a new one, at once. Its stages are
        lost."""
        self._renewed = time.monotonic()
        self._process.close()

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _begun(self) -> tuple[DeviceProcess, Mapping[str, Any]]:
        """A process that has opened the folder, and what it has told of it."""
        process = self._begin()
        folder = str(self._folder.root.absolute())
        fields = {"device": self.name, "folder": folder, **self._how}
        try:
            return process, process.ask(Message("open", fields), limit_s=LOAD_LIMIT_S).fields
        except BaseException:
            process.close()
            raise

    def _count_loss(self) -> None:
        lost = self._process.lost
        if lost is None or lost.reason == CLOSED or lost.moment in (self._forgiven, *self._losses[-1:]):
            return
        self._losses.append(lost.moment)
        self.last_loss = lost.reason

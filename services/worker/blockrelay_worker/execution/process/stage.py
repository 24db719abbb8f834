"""Stages that run in the process of a device: the worker's side."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.capabilities import Capabilities
from blockrelay_worker.execution.batch import (
    Batch,
    BlockFault,
    StageOutput,
    check_segments,
    hidden_of,
    tensors_of,
    tokens_of,
)
from blockrelay_worker.execution.executor import PageContent
from blockrelay_worker.execution.page_layout import layout_of
from blockrelay_worker.execution.page_pool import PagePool
from blockrelay_worker.execution.process.device_process import DeviceProcess
from blockrelay_worker.execution.process.figures import Figures
from blockrelay_worker.execution.process.frames import Message
from blockrelay_worker.execution.process.step_arrays import packed_tensors, unpacked_rows, unpacked_tensors
from blockrelay_worker.execution.process.step_drift import StepDrift, shape_of
from blockrelay_worker.kernels.specification import PAGE


class DeviceStage:
    """Blocks `first_block..last_block` in the process of a device. The worker knows which run has which KV page, the
    process what is in it. When the process is lost, the stage is lost with all its pages. Implements `Executor`.

    Each method that asks the process something raises DeviceFailed if the device could not do it and its process still
    runs, and DeviceLost if the process is gone.

    Three hooks may be set by the owner. `waiting` is entered by a thread that waits for other stages of the device.
    `on_progress` is called when a part of a long step is done. `allowed_s` returns the seconds that a step may take, if
    more than the limit.
    """

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
        """`loaded`: the fields of the process's answer to `load`: stage (its number there), pages, max_rows,
        max_sequences, details, figures. A step that takes more than `limit_s` seconds without progress ends the
        process, unless `allowed_s` gives it longer."""
        self.folder, self.first_block, self.last_block = folder, first_block, last_block
        self.takes_tokens, self.gives_logits = first_block == 1, last_block == folder.model.blocks
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
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        self.on_progress: Callable[[], None] = lambda: None
        self.allowed_s: Callable[[], float] = lambda: 0.0

    @property
    def usable(self) -> bool:
        """True while the process of the device runs."""
        return self._process.lost is None

    def check(self) -> None:
        """Raises DeviceLost if the stage is no longer usable."""
        self._process.check()

    def when_lost(self, tell: Callable[[], None]) -> None:
        """Has `tell` called once, from any thread, when the process is lost. A second call replaces the first.

        `tell` is not called when the worker itself closes the process, nor if the process was lost before this call.
        """
        self._process.when_lost[self._stage] = tell

    def run(self, batch: Batch) -> StageOutput:
        """Runs a batch: see `Executor.run`. Raises ExecutionError for a batch that is not valid."""
        began = time.perf_counter()
        answer = self._ask_of("run", batch)
        moved_s = time.perf_counter() - began - answer.fields["ran_s"]
        self.figures.hear(answer.fields["figures"])
        self.drift.add(shape_of(batch.segments), sum(answer.fields["seconds"].values()))
        chosen, named = answer.fields.get("rows"), answer.fields.get("tensors")
        return StageOutput(
            hidden=answer.arrays[0] if not self.gives_logits and named is None else None,
            tensors=None if named is None else unpacked_tensors(named, answer.arrays),
            logits=answer.arrays[0] if self.gives_logits and chosen is None else None,
            rows=None if chosen is None else unpacked_rows(chosen, answer.arrays),
            not_finite=tuple(answer.fields["not_finite"]),
            seconds=dict(answer.fields["seconds"]),
            estimated=answer.fields["estimated"],
            kv_s=answer.fields["kv_s"],
            moved_s=moved_s,
            sessions=self.figures.sessions,
        )

    def first_not_finite(self, batch: Batch) -> BlockFault | None:
        """Finds the first block whose output is NaN or infinite: see `Executor.first_not_finite`."""
        fields = self._ask_of("first_not_finite", batch).fields
        return BlockFault(block=fields["block"], seconds=fields["seconds"]) if fields["block"] else None

    def export_pages(self, pages: Sequence[int]) -> list[PageContent]:
        """Returns copies of the pages, in the type of `layout`: keys and values by layer."""
        if not pages or self.layout.layers < 1:
            return [[] for _ in pages]
        halves = self._ask("export", {"pages": list(pages)}).arrays
        pairs = list(zip(halves[::2], halves[1::2], strict=True))
        layers = self.layout.layers
        return [pairs[at * layers : (at + 1) * layers] for at in range(len(pages))]

    def import_pages(self, pages: Sequence[int], contents: Sequence[PageContent]) -> None:
        """Writes pages: see `PageOwner.import_pages`."""
        if pages and self.layout.layers > 0:
            halves = [np.asarray(half) for content in contents for layer in content for half in layer]
            self._ask("import", {"pages": list(pages)}, halves)

    def canary(self) -> None:
        """Computes one known step. Raises DeviceLost (reason `canary`) if the result is wrong."""
        self._ask("canary")

    def clean_up(self) -> None:
        """Has the device give back what it keeps for later steps, and starts new samples of `drift`."""
        self.drift.was_cleaned()
        self._ask("clean_up")

    def close(self) -> None:
        """Gives back what the stage holds on the device; does nothing if the process is gone already."""
        if self._process.lost is None:
            self._ask("close")

    def _ask_of(self, kind: str, batch: Batch) -> Message:
        """Sends a batch, after checking it, and returns the answer."""
        model = self.folder.model
        pages = self.pool.pages if self.layout.layers > 0 else 0
        count = check_segments(batch.segments, limit=model.max_position, pages=pages)
        named = model.onnx_blocks is not None and not self.takes_tokens  # ONNX blocks take tokens in every stage
        rows: NDArray[Any] = (tokens_of if self.takes_tokens or named else hidden_of)(batch, count, model)
        tensors, arrays = packed_tensors(tensors_of(batch) if named else ())
        segments = [(s.rows, s.first_position, list(s.pages) if pages else []) for s in batch.segments]
        fields = {"segments": segments, "wanted": list(batch.wanted), "needs": list(batch.needs)}
        return self._ask(kind, fields | {"tensors": tensors}, [rows, *arrays])

    def _ask(self, kind: str, fields: Mapping[str, Any] | None = None, arrays: Sequence[NDArray[Any]] = ()) -> Message:
        message = Message(kind, {"stage": self._stage, **(fields or {})}, arrays)
        limit_s = max(self._limit_s, self.allowed_s())
        return self._process.ask(message, limit_s=limit_s, waiting=self.waiting, on_progress=self.on_progress)

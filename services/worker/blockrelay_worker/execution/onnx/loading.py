"""How stages come onto the device of an execution provider."""

import hashlib
import json
import math
from collections.abc import Collection
from typing import ClassVar

import numpy as np

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.block_folder.model import Precision
from blockrelay.protocol.plan import Device
from blockrelay_worker.execution.device_memory import DeviceMemory
from blockrelay_worker.execution.numerics_id import PAGE_LAYOUT, SAMPLER_VERSION
from blockrelay_worker.execution.onnx.graphs import GRAPHS_VERSION, FloatType, weight_shapes
from blockrelay_worker.execution.onnx.known_answers import PAGES_NEEDED, TOLERANCES, Answers, check, known_answers
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider, Provider
from blockrelay_worker.execution.onnx.stage import OnnxStage
from blockrelay_worker.execution.page_layout import PageLayout, layout_of


class OnnxExecutors:
    """Makes executors that compute on one device, with floats of one type."""

    device: ClassVar[Device] = "gpu"
    varies: ClassVar[bool] = True

    def __init__(self, provider: Provider, dtype: FloatType = "float32", *, per_block: bool = False) -> None:
        """`per_block` as of OnnxStage."""
        self._provider, self._per_block = provider, per_block
        self._dtype: FloatType = dtype
        self._answers: dict[tuple[str, int, int], Answers] = {}

    @staticmethod
    def serves(device: Device, precisions: Collection[Precision]) -> bool:
        """All there are: weights are widened."""
        return device == "gpu"

    def numerics_id(self, manifest: Manifest) -> str:
        """`<precision>-<provider>-<16 hex digits>`, or `mixed-`: a CPU executor's has no provider's name."""
        parts = {
            "precision": manifest.precision,
            "graphs": GRAPHS_VERSION,
            "sampler": SAMPLER_VERSION,
            "pages": PAGE_LAYOUT,
            "provider": self._provider.identity,
            "type": self._dtype,
            "folder": manifest.numerics_inputs(),
        } | ({"graphs of": "blocks"} if self._per_block else {})
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        same = len(set(manifest.precisions)) == 1
        return f"{manifest.precision if same else 'mixed'}-{self._provider.name}-{digest[:16]}"

    def layout(self, folder: BlockFolder, first_block: int, last_block: int) -> PageLayout:
        return layout_of(folder, first_block, last_block)

    def page_bytes(self, layout: PageLayout) -> int:
        return layout.bytes_per_page * np.dtype(self._dtype).itemsize // np.dtype(layout.dtype).itemsize

    def memory(self, folder: BlockFolder) -> DeviceMemory:
        """Of the device, as far as it tells."""
        model, item = folder.model, np.dtype(self._dtype).itemsize
        return DeviceMemory(
            device=self._provider.device,
            block_bytes=[
                item * sum(math.prod(shape) for shape in weight_shapes(model, block).values())
                for block in range(1, model.blocks + 1)
            ],
            table_bytes=item * model.max_position * model.head_dim,
            least_pages=PAGES_NEEDED,
            budget_bytes=self._provider.budget_bytes(),
        )

    def usable_in_s(self) -> float:
        return 0.0

    def load(self, folder: BlockFolder, first_block: int, last_block: int, *, pages: int) -> OnnxStage:
        """On any device but the reference, the stage has given its answers, known from there."""
        stage = self._stage(folder, first_block, last_block, pages=max(PAGES_NEEDED, pages), provider=self._provider)
        try:
            if self._provider.name != CpuProvider.name:
                answers = self.answers(folder, first_block, last_block)
                check(stage, answers, where=self._provider.device, tolerance=self.tolerance)
            stage.measure_blocks()
        except BaseException:
            stage.close()
            raise
        return stage

    def answers(self, folder: BlockFolder, first_block: int, last_block: int) -> Answers:
        """What a stage of these blocks must give, within `tolerance`. Made once."""
        key = (folder.manifest.model_hash, first_block, last_block)
        if key not in self._answers:
            self._answers[key] = known_answers(folder, first_block, last_block, self._reference)
        return self._answers[key]

    @property
    def tolerance(self) -> float:
        """See `known_answers.TOLERANCES`."""
        return TOLERANCES[self._dtype]

    def _reference(self, folder: BlockFolder, block: int) -> OnnxStage:
        return self._stage(folder, block, block, pages=PAGES_NEEDED, provider=CpuProvider())

    def _stage(
        self, folder: BlockFolder, first_block: int, last_block: int, *, pages: int, provider: Provider
    ) -> OnnxStage:
        return OnnxStage(
            folder,
            first_block,
            last_block,
            pages=pages,
            provider=provider,
            numerics_id=self.numerics_id(folder.manifest),
            dtype=self._dtype if provider is self._provider else "float32",
            per_block=self._per_block and provider is self._provider,
        )

"""Loads stages onto the device of an execution provider, proves that they compute rightly, and names their numerics
id."""

import math
import weakref
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import numpy as np

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.block_folder.model import ModelConfig
from blockrelay.block_folder.precisions import kv_item_bytes
from blockrelay_worker.execution.device_memory import DeviceMemory
from blockrelay_worker.execution.numerics_id import PAGE_LAYOUT, SAMPLER_VERSION, hashed_id
from blockrelay_worker.execution.onnx.graphs.flavours import PAGED, PAGED_IN_PARTS, PLAIN, Flavour
from blockrelay_worker.execution.onnx.graphs.linears import BITS, is_packed
from blockrelay_worker.execution.onnx.graphs.stage import weight_shapes
from blockrelay_worker.execution.onnx.known_answers import (
    PAGES_NEEDED,
    TOLERANCES,
    Answers,
    answers_of_blocks,
    check,
    composed_answers,
    known_answers,
)
from blockrelay_worker.execution.onnx.probe import PagedAttention, can_multiply, failure, paged_attention
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider, Provider
from blockrelay_worker.execution.onnx.stage import OnnxStage
from blockrelay_worker.execution.onnx.weights.arrays import bits_in, forms_of
from blockrelay_worker.execution.onnx.weights.resident import TABLES, ResidentWeights
from blockrelay_worker.execution.page_layout import layout_of


@dataclass(frozen=True, slots=True)
class _OfModel:
    """What is kept for one model: its weights on the device, and the reference's `answers` by first and last block."""

    weights: ResidentWeights
    answers: dict[tuple[int, int], Answers]


class OnnxExecutors:
    """Makes executors that compute on one device. One thread uses it.

    Blocks are numbered from 1; `first_block..last_block` includes both. The first call with a model may probe the
    device. Any method may then raise KnownAnswerMismatch for wrong attention, and ONNX Runtime's error if the device is
    lost or has no room.
    """

    def __init__(self, provider: Provider, *, per_block: bool = False, capture: bool | None = None) -> None:
        """`per_block`: blocks run one by one, so that each is measured. `capture`: decode steps are recorded and
        replayed, except with `per_block`; None: if the provider recommends it."""
        self._provider, self._per_block = provider, per_block
        self._capture = (provider.captures if capture is None else capture) and not per_block
        self._paged_attention = cache(partial(paged_attention, provider))
        self._can_multiply = cache(partial(can_multiply, provider))
        self._models: dict[str, _OfModel] = {}
        self._composed: weakref.WeakKeyDictionary[OnnxStage, Answers] = weakref.WeakKeyDictionary()

    def numerics_id(self, manifest: Manifest) -> str:
        """Returns `<precision>-<provider>-<16 hex digits>`, with `mixed` for several precisions. Here
        ONNX Runtime's CPU provider has a name too; the ids of our own CPU kernels have none."""
        flavour = self.flavour_of(manifest)
        parts = {
            "precision": manifest.precision,
            "graphs": f"{flavour.name} {flavour.version}",
            "longest": self._longest(manifest.model, flavour),
            "sampler": SAMPLER_VERSION,
            "pages": PAGE_LAYOUT,
            "provider": self._provider.identity,
            "type": flavour.dtype,
            "folder": manifest.numerics_inputs(),
        } | ({"graphs of": "blocks"} if self._per_block else {})
        if small := bits_in(forms_of(manifest, self._small(manifest)).values()):
            parts["weights"] = f"bits {small}"
        return hashed_id(manifest, parts, self._provider.name)

    def memory(self, folder: BlockFolder) -> DeviceMemory:
        """Returns the memory that blocks and pages take on the device, and its budget where the provider knows it."""
        model, dtype = folder.model, self.flavour_of(folder.manifest).dtype
        item = np.dtype(dtype).itemsize
        forms = forms_of(folder.manifest, self._small(folder.manifest))
        return DeviceMemory(
            device=self._provider.device,
            block_bytes=[
                sum(
                    math.prod(shape) * (1 if is_packed(name, form.bits) else item)
                    for name, shape in weight_shapes(model, block, form.bits).items()
                )
                for block, form in forms.items()
            ],
            block_layers=[*[1] * model.layers, 0],
            table_bytes=item * model.max_position * model.head_dim,
            layer_page_bytes=replace(
                layout_of(folder, 1, 1), dtype=np.float16 if dtype == "float16" else np.float32
            ).bytes_per_page,
            least_pages=PAGES_NEEDED,
            canary_pages=PAGES_NEEDED,
            budget_bytes=self._provider.budget_bytes(),
        )

    def resident(self, folder: BlockFolder, first_block: int, last_block: int) -> set[int]:
        """Returns the blocks of `first_block..last_block` whose weights are on the device already and need not be
        read."""
        blocks = range(first_block, last_block + 1)
        return set(blocks).difference(self._of(folder).weights.missing(blocks))

    def load(
        self, folder: BlockFolder, first_block: int, last_block: int, *, pages: int, weight_room: int = 0
    ) -> OnnxStage:
        """Returns a stage that has given its known answers (on the device that is the reference there are none).

        The model must have a block `last_block`. The stage has `pages` KV pages, or PAGES_NEEDED if that is more. The
        caller closes it.

        Weights of closed stages stay on the device while all weights take no more than `weight_room` bytes, and those
        of this stage are not uploaded again. Weights of other folders stay only while a stage uses them. If each of its
        blocks has given known answers in this process since its upload, they need not do it again: then the stage is
        compared with its own blocks, one by one, in a few steps. Only their composition may still be wrong; for that
        the blocks are a better reference than another device, and one that is here.

        Raises KnownAnswerMismatch for wrong numbers, ExecutionError if a known step fails, and ONNX Runtime's error if
        it cannot make a session or has no memory.
        Raises BlockFolderError if `first_block` is below 1 or above `last_block`, or if a block's file is shorter than
        the manifest says. Raises UsageError if this machine lacks something that the provider needs, or if the device
        has no buffer as large as the stage needs.
        """
        flavour, blocks = self.flavour_of(folder.manifest), range(first_block, last_block + 1)
        known = self._of(folder)
        weights, sizes = known.weights, self.memory(folder).block_bytes
        more = sum(sizes[block - 1] for block in weights.missing(blocks))
        others = [one.weights for one in self._models.values() if one is not known]
        for other in others:
            other.make_room([], more_bytes=0, room_bytes=0)
        room = max(0, weight_room - sum(other.bytes for other in others))
        weights.make_room([TABLES, *blocks], more_bytes=more, room_bytes=room)
        proved = weights.are_proved(blocks)
        stage = OnnxStage(
            folder,
            first_block,
            last_block,
            pages=max(PAGES_NEEDED, pages),
            provider=self._provider,
            numerics_id=self.numerics_id(folder.manifest),
            flavour=flavour,
            longest=self._longest(folder.model, flavour),
            per_block=self._per_block,
            small=self._small(folder.manifest),
            capture=self._capture,
            weights=weights,
        )
        try:
            self._prove(stage, known, proved=proved)
            if stage not in self._composed:  # else the comparison has measured its blocks
                stage.measure_blocks()
            stage.record_steps()
            stage.details = {**stage.details, **self._compiled(stage)}
        except BaseException:
            stage.close()
            raise
        weights.prove(blocks)
        return stage

    def loaded(
        self, folder: BlockFolder, first_block: int, last_block: int, *, pages: int, weight_room: int
    ) -> tuple[OnnxStage, Answers]:
        """Returns the stage that `load` gives, and its `answers`. Raises the errors that `load` names."""
        stage = self.load(folder, first_block, last_block, pages=pages, weight_room=weight_room)
        return stage, self.answers(stage)

    def _compiled(self, stage: OnnxStage) -> dict[str, str]:
        """Returns details of the stage for the log: kept graphs and recorded steps."""
        graphs, steps, details = self._provider.compiled, stage.captured, dict[str, str]()
        if graphs is not None:
            details["graphs"] = f"{graphs.hits} kept from before, {graphs.made} made"
        if steps is not None:
            details["recorded"] = (steps.off and f"none: {steps.off}") or f"decode steps of {steps.graphs} shapes"
        return details

    def _prove(self, stage: OnnxStage, known: "_OfModel", *, proved: bool) -> None:
        """Raises KnownAnswerMismatch if the stage computes wrongly. `proved`: its blocks need not answer again."""
        folder, first, last = stage.folder, stage.first_block, stage.last_block
        tolerance, where = self.tolerance(folder.manifest), self._provider.device
        is_reference = self._provider.name == CpuProvider.name
        if not proved and not is_reference:
            for answers in answers_of_blocks(folder, first, last, reference):
                block = stage if first == last else stage.block_alone(answers.first_block, pages=PAGES_NEEDED)
                try:
                    check(block, answers, where=where, tolerance=tolerance)
                finally:
                    if block is not stage:
                        block.close()
                if first == last:
                    known.answers[first, last] = answers
        if first < last and (proved or not is_reference):
            with stage.block_by_block():
                self._composed[stage] = composed_answers(stage, first, last, folder.model)
            check(stage, self._composed[stage], where=where, tolerance=tolerance)

    def answers(self, stage: OnnxStage) -> Answers:
        """Returns what a stage loaded here must give, within `tolerance`: what its blocks gave one by one, or else the
        reference's answers. Computed once."""
        if stage in self._composed:
            return self._composed[stage]
        answers, blocks = self._of(stage.folder).answers, (stage.first_block, stage.last_block)
        if blocks not in answers:
            answers[blocks] = known_answers(stage.folder, *blocks, reference)
        return answers[blocks]

    def _of(self, folder: BlockFolder) -> "_OfModel":
        key, manifest = folder.manifest.model_hash, folder.manifest
        if key not in self._models:
            flavour, forms = self.flavour_of(manifest), forms_of(manifest, self._small(manifest))
            self._models[key] = _OfModel(ResidentWeights(self._provider, folder.model, flavour, forms), {})
        return self._models[key]

    def tolerance(self, manifest: Manifest) -> float:
        """Returns the allowed error of a row, relative to its length, for the folder's float type (`TOLERANCES`)."""
        return TOLERANCES[self.flavour_of(manifest).dtype]

    def flavour_of(self, manifest: Manifest) -> Flavour:
        """Returns the best flavour that the device can run with this model's precisions and heads.

        The first call for a model may probe the device. It then raises KnownAnswerMismatch if attention is wrong in
        short sequences too, and ONNX Runtime's error if the device is lost or has no room.
        """
        narrow = kv_item_bytes(manifest.precisions) == 2
        can = narrow and self._provider.has_paged_attention and self._has_float16
        if not can or self._attention_of(manifest.model).refusal:
            return PLAIN
        return PAGED_IN_PARTS if self._provider.adds_in_float16 else PAGED

    @cached_property
    def _has_float16(self) -> bool:
        return not failure(self._provider, "float16")

    def _small(self, manifest: Manifest) -> list[int]:
        """Returns the bits of this model's weights that need not be widened on the device. Each number of bits is
        probed once."""
        dtype = self.flavour_of(manifest).dtype
        few = {BITS[precision] for precision in manifest.precisions if precision in BITS}
        return [bits for bits in few if self._can_multiply(bits, dtype)]

    def _longest(self, model: ModelConfig, flavour: Flavour) -> int | None:
        """Returns up to how many tokens of a sequence the flavour attends rightly in one step; None: any number."""
        return None if flavour == PLAIN else self._attention_of(model).longest

    def _attention_of(self, model: ModelConfig) -> PagedAttention:
        """Returns what the device can do with this model's heads; probed once for a model in several precisions."""
        return self._paged_attention(replace(model, name=""))


def reference(folder: BlockFolder, block: int) -> OnnxStage:
    """Returns a stage of one block on ONNX Runtime's CPU provider, in float32, with PAGES_NEEDED KV pages.

    The caller closes it. Raises BlockFolderError for a block that the model does not have or whose file is too short,
    and ONNX Runtime's error if it cannot be loaded.
    """
    return OnnxStage(
        folder, block, block, pages=PAGES_NEEDED, provider=CpuProvider(), numerics_id="reference", flavour=PLAIN
    )

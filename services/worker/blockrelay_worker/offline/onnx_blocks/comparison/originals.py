"""Runs the original blocks on prompts, one session at a time, and records their rows, KV caches and logits."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import ModelProto, ValueInfoProto

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.cache_names import CacheSlot
from blockrelay.onnx_blocks.llama.graph import TensorPlace
from blockrelay.onnx_blocks.model_file import model_without_weights, name_real_files
from blockrelay.onnx_blocks.reports.importing import ComparedPlaces
from blockrelay.onnx_blocks.wiring import FromBlock, FromPast, FromRequest, Source
from blockrelay_worker.execution.onnx.providers.provider import WEIGHTS_FOLDER
from blockrelay_worker.offline.onnx_blocks.comparison.prompts import Array, StepPrompt
from blockrelay_worker.offline.onnx_blocks.folder import OnnxFolder
from blockrelay_worker.offline.onnx_blocks.onnx_file import OnnxFile

_PACKED, _ACCURACY = "MatMulNBits", "accuracy_level"
#: The accuracy level that keeps rows in float32: exporters may ask for 8 bits, for speed.
_FLOAT_ROWS = 1
_QUIET = 4
_LONGEST_REASON = 300


@dataclass(slots=True)
class RecordedPrompt:
    """The recorded tensors of one prompt."""

    prompt: StepPrompt
    given: list[dict[str, Array]]
    """For each step, the inputs of the request and the tensors that blocks hand on, by name."""
    made: dict[TensorPlace, list[Array]] = field(default_factory=dict[TensorPlace, list[Array]])
    """Tensors to compare, by place: one for each step that was run."""
    pasts: dict[CacheSlot, Array] = field(default_factory=dict[CacheSlot, Array])
    """Keys and values after the last step."""

    def rows(self, places: Sequence[TensorPlace]) -> list[NDArray[np.float32]]:
        """Rows float32 [tokens, width] of each step: the sum of the tensors [1, tokens, width] at `places`.

        `places` has at least one place, and all of them were recorded.
        """
        sums = [step[0].astype(np.float32) for step in self.made[places[0]]]
        for place in places[1:]:
            for rows, step in zip(sums, self.made[place], strict=True):
                rows += step[0]
        return sums

    def cache(self, place: TensorPlace) -> NDArray[np.float32]:
        """Keys or values at a recorded place after the last step, as float32 [tokens, heads * head_dim].

        The recorded tensor is [1, heads, tokens, head_dim].
        """
        whole = self.made[place][-1][0].astype(np.float32)
        return whole.transpose(1, 0, 2).reshape(whole.shape[1], -1)


def record(
    folder: OnnxFolder, places: ComparedPlaces, prompts: Sequence[StepPrompt], empty: tuple[int, int]
) -> list[RecordedPrompt]:
    """Runs all blocks on each prompt and records the tensors at `places`.

    `empty`: heads and head_dim of an empty past. Raises OnnxBlocksError with the file of a block that cannot run.
    """
    records = [
        RecordedPrompt(prompt, [prompt.request(step) for step in range(len(prompt.steps))]) for prompt in prompts
    ]
    wanted = {place for layer in places.layers for place in (*layer.hidden, layer.keys, layer.values)} | {places.logits}
    consumed = folder.wiring.consumed()
    slots = {present.name: slot for slot, present in folder.wiring.presents.items()}
    for file, sources in zip(folder.files, folder.wiring.sources, strict=True):
        of_block = {place.tensor: place for place in wanted if place.block == file.signature.index}
        _Block(folder, file, sources, of_block, consumed, slots).run(records, empty)
    return records


@dataclass(frozen=True, slots=True)
class _Block:
    """One original block, its inputs' sources, and the outputs to keep of it."""

    folder: OnnxFolder
    file: OnnxFile
    sources: Mapping[str, Source]
    wanted: Mapping[str, TensorPlace]
    consumed: Collection[str]
    slots: Mapping[str, CacheSlot]

    def run(self, recorded: Sequence[RecordedPrompt], empty: tuple[int, int]) -> None:
        """Runs the block on all steps of all prompts. Raises OnnxBlocksError if it cannot run."""
        name = self.file.signature.file
        outputs = [tensor.name for tensor in self.file.signature.outputs]
        names = [*outputs, *(one for one in self.wanted if one not in outputs)]
        try:
            session = self._session([one for one in names if one not in outputs])
            for one in recorded:
                for given in one.given:
                    made: Any = session.run(names, self._feeds(given, one.pasts, empty))
                    self._keep(one, given, dict(zip(names, made, strict=True)))
        except OnnxBlocksError:
            raise
        except Exception as error:  # noqa: BLE001 ONNX Runtime's own exception types have no public common base
            reason = " ".join(str(error).split())[:_LONGEST_REASON]
            raise OnnxBlocksError(f"the original cannot run: {reason}", file=name) from None

    def _session(self, extra: Sequence[str]) -> ort.InferenceSession:
        """A session of the block, with the tensors `extra` as additional outputs."""
        model = model_without_weights(self.file.path, self.file.signature.file)
        model.graph.output.extend(ValueInfoProto(name=name) for name in extra)
        _keep_rows_as_floats(model)
        options = ort.SessionOptions()
        options.log_severity_level = _QUIET
        options.add_session_config_entry(WEIGHTS_FOLDER, str(name_real_files(model, self.folder.root)))
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def _feeds(
        self, given: Mapping[str, Array], pasts: Mapping[CacheSlot, Array], empty: tuple[int, int]
    ) -> dict[str, Array]:
        feeds: dict[str, Array] = {}
        for tensor in self.file.signature.inputs:
            source = self.sources[tensor.name]
            match source:
                case FromPast(slot):
                    none = np.zeros((1, empty[0], 0, empty[1]), tensor.dtype)
                    feeds[tensor.name] = pasts.get(slot, none)
                case FromRequest() | FromBlock():
                    feeds[tensor.name] = given[tensor.name].astype(tensor.dtype, copy=False)
        return feeds

    def _keep(self, one: RecordedPrompt, given: dict[str, Array], made: Mapping[str, Array]) -> None:
        for name, array in made.items():
            if name in self.consumed:
                given[name] = array
            if name in self.slots:
                one.pasts[self.slots[name]] = array
            if name in self.wanted:
                one.made.setdefault(self.wanted[name], []).append(array)


def _keep_rows_as_floats(model: ModelProto) -> None:
    for node in model.graph.node:
        for attribute in node.attribute if node.op_type == _PACKED else ():
            if attribute.name == _ACCURACY:
                attribute.i = _FLOAT_ROWS

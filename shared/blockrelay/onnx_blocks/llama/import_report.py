"""The messages of a running import, one JSON line each.

The converter sends steps and the result to the launcher, which shows them. The worker that compares imported blocks
with the originals gets the places from the converter and sends it the results.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import WireError
from blockrelay.onnx_blocks.llama.graph import Place
from blockrelay.onnx_blocks.llama.model import RowPlaces


@dataclass(frozen=True, slots=True)
class ComparedPlaces:
    """The tensors of the original graphs that are compared with the import: of each layer, and the logits."""

    layers: tuple[RowPlaces, ...]
    logits: Place


@dataclass(frozen=True, slots=True)
class ComparedBlock:
    """The result of comparing one imported block with the original."""

    block: str
    errors: dict[str, float]
    """Difference of the worst row, as a share of the allowed one, of `hidden rows`, `keys`, `values` and `logits`."""
    problem: str = ""
    """Why the block is not near enough; empty if it is."""


@dataclass(frozen=True, slots=True)
class ImportStep:
    """Progress of an import."""

    what: str
    """What is being done, for people."""
    bytes: int
    """Bytes done since the message before."""
    total: int
    """Bytes of the whole import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """The end of an import: the block folder that was written."""

    name: str
    family: str
    precision: str
    stored: str
    """The precision in which the ONNX blocks have the weights, so that it needs no rounding."""
    blocks: int
    bytes: int
    compared: tuple[ComparedBlock, ...]
    cost: float | None
    """The share by which perplexity is above that of the stored precision; None if not measured."""
    notes: tuple[str, ...]
    """Sentences for people about what was missing, assumed or widened."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def encode_places(places: ComparedPlaces) -> str:
    return json.dumps(asdict(places))


def decode_places(content: bytes) -> ComparedPlaces:
    """Decodes the places to compare. Raises WireError."""
    fields = Fields.parse(content, "the places to compare", WireError)
    layers = tuple(
        RowPlaces(
            tuple(map(_place, layer.nested_list("hidden"))),
            _place(layer.nested("keys")),
            _place(layer.nested("values")),
        )
        for layer in fields.nested_list("layers")
    )
    places = ComparedPlaces(layers, _place(fields.nested("logits")))
    fields.done()
    return places


def _place(fields: Fields) -> Place:
    return Place(fields.integer("block", minimum=1), fields.text("tensor"))


def encode_compared(block: ComparedBlock) -> str:
    return json.dumps(asdict(block))


def decode_compared(line: bytes) -> ComparedBlock:
    """Decodes the result of comparing one block. Raises WireError."""
    return _compared(Fields.parse(line, "a line of the comparison", WireError))


def _compared(fields: Fields) -> ComparedBlock:
    errors = fields.nested("errors")
    compared = ComparedBlock(
        fields.text("block"), {name: errors.number(name) for name in errors.names()}, fields.text("problem")
    )
    fields.done()
    return compared


def encode_step(step: ImportStep) -> str:
    return json.dumps({"step": asdict(step)})


def encode_result(result: ImportResult) -> str:
    return json.dumps({"result": result.as_json()})


def decode_told(line: bytes) -> ImportStep | ImportResult:
    """Decodes a line from the converter, a step or the result. Raises WireError."""
    fields = Fields.parse(line, "a line of the import", WireError)
    if fields.has("step"):
        inner = fields.nested("step")
        step = ImportStep(inner.text("what"), inner.integer("bytes"), inner.integer("total"))
        inner.done()
        return step
    inner = fields.nested("result")
    result = ImportResult(
        name=inner.text("name"),
        family=inner.text("family"),
        precision=inner.text("precision"),
        stored=inner.text("stored"),
        blocks=inner.integer("blocks"),
        bytes=inner.integer("bytes"),
        compared=_all_compared(inner.nested_list("compared")),
        cost=inner.optional_number("cost"),
        notes=inner.texts("notes"),
    )
    inner.done()
    return result


def _all_compared(listed: Sequence[Fields]) -> tuple[ComparedBlock, ...]:
    return tuple(map(_compared, listed))

"""What an import tells while it runs, one JSON line each: the converter to the launcher that shows it, and the worker
that compares blocks to the converter that has it done."""

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
    """What of the original graphs is compared: of each layer, and the logits."""

    layers: tuple[RowPlaces, ...]
    logits: Place


@dataclass(frozen=True, slots=True)
class ComparedBlock:
    """How far the worst row of an imported block is from the original's, as a part of what is allowed, by what was
    compared: `hidden rows`, `keys`, `values`, `logits`. `problem` is empty for a block that is near enough."""

    block: str
    errors: dict[str, float]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ImportStep:
    """`what` is being done; `bytes` more are, of `total`."""

    what: str
    bytes: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """The folder that was written."""

    name: str
    family: str
    precision: str
    stored: str
    """The precision that needs no rounding."""
    blocks: int
    bytes: int
    compared: tuple[ComparedBlock, ...]
    cost: float | None
    """The share by which perplexity is above that of the stored precision; None: not measured."""
    notes: tuple[str, ...]
    """What was missing, assumed or widened, each a sentence."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def encode_places(places: ComparedPlaces) -> str:
    return json.dumps(asdict(places))


def decode_places(content: bytes) -> ComparedPlaces:
    """Raises WireError."""
    fields = Fields.parse(content, "the places to compare", WireError)
    layers = tuple(
        RowPlaces(
            tuple(map(_place, one.nested_list("hidden"))), _place(one.nested("keys")), _place(one.nested("values"))
        )
        for one in fields.nested_list("layers")
    )
    places = ComparedPlaces(layers, _place(fields.nested("logits")))
    fields.done()
    return places


def _place(fields: Fields) -> Place:
    return Place(fields.integer("block", minimum=1), fields.text("tensor"))


def encode_compared(block: ComparedBlock) -> str:
    return json.dumps(asdict(block))


def decode_compared(line: bytes) -> ComparedBlock:
    """Raises WireError."""
    return _compared(Fields.parse(line, "a line of the comparison", WireError))


def _compared(fields: Fields) -> ComparedBlock:
    errors = fields.nested("errors")
    found = ComparedBlock(
        fields.text("block"), {name: errors.number(name) for name in errors.names()}, fields.text("problem")
    )
    fields.done()
    return found


def encode_step(step: ImportStep) -> str:
    return json.dumps({"step": asdict(step)})


def encode_result(result: ImportResult) -> str:
    return json.dumps({"result": result.as_json()})


def decode_told(line: bytes) -> ImportStep | ImportResult:
    """Either of them. Raises WireError."""
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

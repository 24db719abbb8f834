"""`profiling_results.json`: how long each block takes on each class of device, as `blockrelay profile` measured it.

Two forms are read and written. The full one is what `encode` writes. The source's, that of the ONNX block server, has
seconds of one row alone: `{"block_1": {"CPU": 0.245, "GPU": 0.11}}`.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from blockrelay.block_folder.strict_json import Fields
from blockrelay.bounded_file import read_bounded
from blockrelay.errors import UsageError
from blockrelay.typed_command import typed

#: Tokens that each row attends to in `BlockProfile.seconds`.
BASE_CONTEXT = 128
#: Larger files are no profile of ours.
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProfile:
    """One block on one class of device."""

    seconds: Mapping[int, float]
    """Of a step by its rows, each of a request of its own with BASE_CONTEXT tokens. Never empty."""
    spread: Mapping[int, float] = field(default_factory=dict[int, float])
    """Of the same: half the distance between the quartiles, as a share of the median."""
    seconds_at_context: Mapping[int, Mapping[int, float]] = field(default_factory=dict[int, Mapping[int, float]])
    """The same at longer contexts; what is missing was not measured."""
    spread_at_context: Mapping[int, Mapping[int, float]] = field(default_factory=dict[int, Mapping[int, float]])
    load_seconds: float | None = None
    load_spread: float | None = None
    bytes: int | None = None
    kv_bytes_per_token: int | None = None

    def at(self, rows: float, context: float) -> float:
        """Seconds of a step of `rows` >= 1 rows that attend to `context` tokens each.

        Straight lines between what was measured; behind the last the line of the last two goes on. Where no longer
        context was measured, context costs nothing.
        """
        base = _line(self.seconds, rows)
        longer = {c: by_rows for c, by_rows in self.seconds_at_context.items() if by_rows}
        if not longer:
            return base
        times = {float(BASE_CONTEXT): base}
        for each, by_rows in longer.items():
            known = {r: by_rows[r] / _line(self.seconds, r) for r in by_rows}
            times[float(each)] = base * _line(known, min(max(rows, min(known)), max(known)))
        return max(_line(times, context), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTimes:
    """The matrix products of a layer, and those of the head, in one precision: seconds by rows. Never empty."""

    layer: Mapping[int, float]
    head: Mapping[int, float]
    spread: Mapping[int, float] = field(default_factory=dict[int, float])
    """Of the layer's, as in `BlockProfile`."""

    def at(self, rows: float, *, is_head: bool) -> float:
        """Seconds with `rows` >= 1 rows, on straight lines as in `BlockProfile.at`."""
        return max(_line(self.head if is_head else self.layer, rows), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """What carries rows from a stage to the next: seconds of each message and of each byte in it; the spread is that of
    a message with one row, or of the steps of the system that the hop was taken from."""

    seconds: float
    seconds_per_byte: float
    spread: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOverhead:
    """What a step takes beside its blocks (sampling, commits, streams): seconds, and seconds of each of its rows; the
    spread is that of the whole step, where it was largest."""

    seconds: float = 0.0
    seconds_per_row: float = 0.0
    spread: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All that was measured of one model on one machine. `blocks` block -> class -> times; class as plans name it."""

    model: str = ""
    model_hash: str = ""
    machine: str = ""
    measured: str = ""
    blocks: Mapping[str, Mapping[str, BlockProfile]]
    products: Mapping[str, Mapping[str, ProductTimes]] = field(default_factory=dict[str, Mapping[str, ProductTimes]])
    """By class and precision: of made-up weights, for blocks in precisions that they were not measured in."""
    hop: Mapping[str, Hop] = field(default_factory=dict[str, Hop])
    step: StepOverhead = StepOverhead()

    @property
    def classes(self) -> tuple[str, ...]:
        """Those of which every block was measured."""
        every = [set(classes) for classes in self.blocks.values()]
        return tuple(sorted(set.intersection(*every))) if every else ()

    def encode(self) -> str:
        """The file."""
        content: dict[str, Any] = {
            "model": self.model,
            "model_hash": self.model_hash,
            "machine": self.machine,
            "measured": self.measured,
            "blocks": {
                block: {name: _encoded(times) for name, times in classes.items()}
                for block, classes in self.blocks.items()
            },
            "products": {
                name: {
                    precision: {
                        "layer": _numbered(times.layer),
                        "head": _numbered(times.head),
                        "spread": _numbered(times.spread),
                    }
                    for precision, times in precisions.items()
                }
                for name, precisions in self.products.items()
            },
            "hop": {
                name: {"seconds": hop.seconds, "seconds_per_byte": hop.seconds_per_byte, **_known("spread", hop.spread)}
                for name, hop in self.hop.items()
            },
            "step": {
                "seconds": self.step.seconds,
                "seconds_per_row": self.step.seconds_per_row,
                **_known("spread", self.step.spread),
            },
        }
        return json.dumps(content, indent=1, allow_nan=False) + "\n"

    def encode_source(self) -> str:
        """The file in the source's form: seconds of one row. Every block has them of each class."""
        content = {
            block: {name: times.seconds[1] for name, times in classes.items()} for block, classes in self.blocks.items()
        }
        return json.dumps(content, indent=1, allow_nan=False) + "\n"


def read_profile_file(path: Path) -> Profile:
    """The profile in a file, of either form. UsageError names the file and the field."""
    if not path.exists():
        raise UsageError(f"{path}: No such file or directory; `{typed('profile')}` writes one")
    return decode_profile(read_bounded(path, _MAX_BYTES), str(path))


def decode_profile(content: bytes, where: str) -> Profile:
    """Read the file, of either form. UsageError names the file and the field."""
    if len(content) > _MAX_BYTES:
        raise UsageError(f"{where}: larger than {_MAX_BYTES >> 20} MiB")
    fields = Fields.parse(content, where, UsageError)
    if not fields.has("blocks"):
        return Profile(blocks=_blocks(fields))
    hops = fields.nested("hop") if fields.has("hop") else Fields({}, where, UsageError)
    step = fields.nested("step") if fields.has("step") else None
    products = fields.nested("products") if fields.has("products") else Fields({}, where, UsageError)
    profile = Profile(
        model=fields.text("model"),
        model_hash=fields.text("model_hash"),
        machine=fields.text("machine"),
        measured=fields.text("measured"),
        blocks=_blocks(fields.nested("blocks")),
        products={name: _products(products.nested(name)) for name in products.names()},
        hop={name: _hop(hops.nested(name)) for name in hops.names()},
        step=StepOverhead(
            seconds=step.positive("seconds", zero=True),
            seconds_per_row=step.positive("seconds_per_row", zero=True),
            spread=_spread(step),
        )
        if step
        else StepOverhead(),
    )
    if step:
        step.done()
    fields.done()
    return profile


def _blocks(fields: Fields) -> dict[str, dict[str, BlockProfile]]:
    found: dict[str, dict[str, BlockProfile]] = {}
    for block in fields.names():
        classes = fields.nested(block)
        found[block] = {name: _times(classes, name) for name in classes.names()}
        if not found[block]:
            classes.fail("no device was measured")
    if not found:
        fields.fail("no block was measured")
    return found


def _times(classes: Fields, name: str) -> BlockProfile:
    value = classes.take(name)
    if not isinstance(value, dict):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            classes.fail(f"{name} must be seconds, above 0, or an object with them")
        return BlockProfile(seconds={1: float(value)})
    one = classes.inner(name, cast(object, value))
    times = BlockProfile(
        seconds=_by_number(one.nested("seconds")),
        spread=_by_number(one.nested("spread"), zero=True) if one.has("spread") else {},
        seconds_at_context=_by_context(one, "seconds_at_context"),
        spread_at_context=_by_context(one, "spread_at_context", zero=True),
        load_seconds=one.positive("load_seconds", zero=True) if one.has("load_seconds") else None,
        load_spread=_spread(one, "load_spread"),
        bytes=one.integer("bytes") if one.has("bytes") else None,
        kv_bytes_per_token=one.integer("kv_bytes_per_token") if one.has("kv_bytes_per_token") else None,
    )
    one.done()
    if not times.seconds:
        one.fail("seconds: nothing was measured")
    return times


def _by_context(block: Fields, name: str, *, zero: bool = False) -> dict[int, dict[int, float]]:
    contexts = block.nested(name) if block.has(name) else None
    if contexts is None:
        return {}
    return {_number(contexts, one): _by_number(contexts.nested(one), zero=zero) for one in contexts.names()}


def _spread(fields: Fields, name: str = "spread") -> float | None:
    return fields.positive(name, zero=True) if fields.has(name) else None


def _by_number(fields: Fields, *, zero: bool = False) -> dict[int, float]:
    return dict(sorted((_number(fields, name), fields.positive(name, zero=zero)) for name in fields.names()))


def _number(fields: Fields, name: str) -> int:
    if not name.isascii() or not name.isdigit() or not 0 < int(name) < 1 << 31:
        fields.fail(f"{name!r} must be a whole number above 0")
    return int(name)


def _products(fields: Fields) -> dict[str, ProductTimes]:
    found: dict[str, ProductTimes] = {}
    for precision in fields.names():
        one = fields.nested(precision)
        found[precision] = ProductTimes(
            layer=_by_number(one.nested("layer")),
            head=_by_number(one.nested("head")),
            spread=_by_number(one.nested("spread"), zero=True) if one.has("spread") else {},
        )
        one.done()
        if not found[precision].layer or not found[precision].head:
            one.fail("nothing was measured")
    return found


def _hop(fields: Fields) -> Hop:
    hop = Hop(
        seconds=fields.positive("seconds", zero=True),
        seconds_per_byte=fields.positive("seconds_per_byte", zero=True),
        spread=_spread(fields),
    )
    fields.done()
    return hop


def _encoded(times: BlockProfile) -> dict[str, Any]:
    content: dict[str, Any] = {
        "seconds": _numbered(times.seconds),
        "spread": _numbered(times.spread),
        "seconds_at_context": {str(context): _numbered(rows) for context, rows in times.seconds_at_context.items()},
        "spread_at_context": {str(context): _numbered(rows) for context, rows in times.spread_at_context.items()},
        **_known("load_seconds", times.load_seconds),
        **_known("load_spread", times.load_spread),
        **_known("bytes", times.bytes),
        **_known("kv_bytes_per_token", times.kv_bytes_per_token),
    }
    return content


def _known(name: str, value: float | None) -> dict[str, float]:
    return {} if value is None else {name: value}


def _numbered(values: Mapping[int, float]) -> dict[str, float]:
    return {str(number): value for number, value in values.items()}


def _line(known: Mapping[int, float] | Mapping[float, float], at: float) -> float:
    """Straight lines through `known`, in ascending order; before the first the first, behind the last the last line."""
    points: Sequence[tuple[float, float]] = sorted(known.items())
    if at <= points[0][0] or len(points) == 1:
        return points[0][1]
    right = min(bisect_left(points, at, key=lambda point: point[0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)

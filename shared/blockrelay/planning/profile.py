"""`profiling_results.json`: the times of each block on each class of device, measured by `blockrelay profile`.

Two forms are read and written. `encode` writes the full one. The short one is that of the ONNX block server and has
only the seconds of a step of one row: `{"block_1": {"CPU": 0.245, "GPU": 0.11}}`.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from blockrelay.block_folder.strict_json import Fields
from blockrelay.bounded_file import read_bounded
from blockrelay.errors import UsageError
from blockrelay.typed_command import typed

#: Tokens that each row attends to in `BlockProfile.seconds`.
BASE_CONTEXT = 128
#: Most bytes of a file. Larger ones are no profile of ours.
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProfile:
    """The measured times of one block on one class of device. A spread is half the distance between the quartiles, as a
    share of the median."""

    seconds: Mapping[int, float]
    """Seconds of a step by its number of rows, each of a request of its own with BASE_CONTEXT tokens. Never empty."""
    spread: Mapping[int, float] = field(default_factory=dict[int, float])
    """The spread of `seconds`, by the number of rows."""
    seconds_at_context: Mapping[int, Mapping[int, float]] = field(default_factory=dict[int, Mapping[int, float]])
    """Seconds of a step by context in tokens, then by rows, for longer contexts. What is missing was not measured."""
    spread_at_context: Mapping[int, Mapping[int, float]] = field(default_factory=dict[int, Mapping[int, float]])
    """The spread of `seconds_at_context`."""
    load_seconds: float | None = None
    """Seconds of loading the block; None if not measured."""
    load_spread: float | None = None
    bytes: int | None = None
    """Bytes of the block's weights; None if unknown."""
    kv_bytes_per_token: int | None = None

    def at(self, rows: float, context: float) -> float:
        """Returns the seconds of a step of `rows` >= 1 rows that attend to `context` tokens each.

        Interpolates linearly between measurements, and extrapolates the line of the last two. Fewer rows than any that
        were measured take as long as the fewest measured. A longer context multiplies the time by a ratio. More
        rows than were measured at a context have the ratio of the most measured, and fewer that of the fewest. Context
        costs nothing if only BASE_CONTEXT was measured. A shorter context takes as long as BASE_CONTEXT.
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
    """The measured times of the linear layers in one precision, in seconds by the number of rows."""

    layer: Mapping[int, float]
    """Seconds of all linear layers of one layer of the model. Never empty."""
    head: Mapping[int, float]
    """Seconds of the head's linear layer. Never empty."""
    spread: Mapping[int, float] = field(default_factory=dict[int, float])
    """The spread of `layer`, as in `BlockProfile`."""

    def at(self, rows: float, *, is_head: bool) -> float:
        """Returns the seconds for `rows` >= 1 rows of the head's linear layer if `is_head`, else of those of a layer.

        They are interpolated as in `BlockProfile.at`.
        """
        return max(_line(self.head if is_head else self.layer, rows), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """The time that hidden states take from one stage to the next."""

    seconds: float
    """Seconds of each message."""
    seconds_per_byte: float
    """Seconds of each byte of a message."""
    spread: float | None = None
    """The spread of a message with one row, or of the steps of the system whose steps gave the hop; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOverhead:
    """The time of a step that is not spent in blocks: sampling, commits, streams."""

    seconds: float = 0.0
    """Seconds of each step."""
    seconds_per_row: float = 0.0
    """Further seconds of each row of the step."""
    spread: float | None = None
    """The largest spread of whole steps; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All measurements of one model on one machine. The texts are empty in a file of the short form."""

    model: str = ""
    """The model's name."""
    model_hash: str = ""
    machine: str = ""
    measured: str = ""
    """Date of the measurement."""
    blocks: Mapping[str, Mapping[str, BlockProfile]]
    """Times by block (`block_1`), then by class of device as plans name it (`CPU`)."""
    products: Mapping[str, Mapping[str, ProductTimes]] = field(default_factory=dict[str, Mapping[str, ProductTimes]])
    """Times of linear layers with made-up weights, by class and precision: for precisions in which no block was
    measured."""
    hop: Mapping[str, Hop] = field(default_factory=dict[str, Hop])
    """Times of hops, by the way that they take: `shared_memory` or `redis`."""
    step: StepOverhead = StepOverhead()

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of devices on which every block was measured, sorted."""
        every = [set(classes) for classes in self.blocks.values()]
        return tuple(sorted(set.intersection(*every))) if every else ()

    def encode(self) -> str:
        """Returns the content of the file in the full form."""
        content = asdict(self, dict_factory=_measured)
        return json.dumps(content, indent=1, allow_nan=False) + "\n"

    def encode_source(self) -> str:
        """Returns the content of the file in the short form. Raises KeyError where one row was not measured."""
        content = {
            block: {name: times.seconds[1] for name, times in classes.items()} for block, classes in self.blocks.items()
        }
        return json.dumps(content, indent=1, allow_nan=False) + "\n"


def read_profile_file(path: Path) -> Profile:
    """Reads a profile of either form from a file. Raises UsageError that names the file and the field."""
    if not path.exists():
        raise UsageError(f"{path}: No such file or directory; `{typed('profile')}` writes one")
    return decode_profile(read_bounded(path, _MAX_BYTES), str(path))


def decode_profile(content: bytes, where: str) -> Profile:
    """Decodes a profile of either form. Raises UsageError that names the file, `where`, and the field."""
    fields = Fields.parse(content, where, UsageError)
    if not fields.has("blocks"):
        return Profile(blocks=_blocks(fields))
    hops, products = fields.part("hop"), fields.part("products")
    step = fields.nested("step") if fields.has("step") else None
    profile = Profile(
        model=fields.text("model"),
        model_hash=fields.text("model_hash"),
        machine=fields.text("machine"),
        measured=fields.text("measured"),
        blocks=_blocks(fields.nested("blocks")),
        products={name: _products(products.nested(name)) for name in products.names()},
        hop={name: hops.read(name, _hop) for name in hops.names()},
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
    blocks: dict[str, dict[str, BlockProfile]] = {}
    for block in fields.names():
        classes = fields.nested(block)
        blocks[block] = {name: _times(classes, name) for name in classes.names()}
        if not blocks[block]:
            classes.fail("no device was measured")
    if not blocks:
        fields.fail("no block was measured")
    return blocks


def _times(classes: Fields, name: str) -> BlockProfile:
    value = classes.take(name)
    if not isinstance(value, dict):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            classes.fail(f"{name} must be seconds, above 0, or an object with them")
        return BlockProfile(seconds={1: float(value)})
    fields = classes.inner(name, cast(object, value))
    times = BlockProfile(
        seconds=_by_number(fields.nested("seconds")),
        spread=_by_number(fields.part("spread"), zero=True),
        seconds_at_context=_by_context(fields.part("seconds_at_context")),
        spread_at_context=_by_context(fields.part("spread_at_context"), zero=True),
        load_seconds=fields.positive("load_seconds", zero=True) if fields.has("load_seconds") else None,
        load_spread=_spread(fields, "load_spread"),
        bytes=fields.integer("bytes") if fields.has("bytes") else None,
        kv_bytes_per_token=fields.integer("kv_bytes_per_token") if fields.has("kv_bytes_per_token") else None,
    )
    fields.done()
    if not times.seconds:
        fields.fail("seconds: nothing was measured")
    return times


def _by_context(contexts: Fields, *, zero: bool = False) -> dict[int, dict[int, float]]:
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
    by_precision: dict[str, ProductTimes] = {}
    for precision in fields.names():
        inner = fields.nested(precision)
        times = by_precision[precision] = ProductTimes(
            layer=_by_number(inner.nested("layer")),
            head=_by_number(inner.nested("head")),
            spread=_by_number(inner.part("spread"), zero=True),
        )
        inner.done()
        if not times.layer or not times.head:
            inner.fail("nothing was measured")
    return by_precision


def _hop(fields: Fields) -> Hop:
    return Hop(
        seconds=fields.positive("seconds", zero=True),
        seconds_per_byte=fields.positive("seconds_per_byte", zero=True),
        spread=_spread(fields),
    )


def _measured(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the fields of a dataclass without those that were not measured."""
    return {name: value for name, value in fields if value is not None}


def _line(known: Mapping[int, float] | Mapping[float, float], at: float) -> float:
    """Interpolates linearly between the points `known`. Returns the first value below the first point; behind the last
    point, extrapolates the line through the last two."""
    points: Sequence[tuple[float, float]] = sorted(known.items())
    if at <= points[0][0] or len(points) == 1:
        return points[0][1]
    right = min(bisect_left(points, at, key=lambda point: point[0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)

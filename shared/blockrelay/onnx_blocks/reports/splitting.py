"""What a split tells while it goes on, from the worker that writes to the launcher that shows it: JSON lines."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import WireError

#: Where the weights of the blocks are: in their files as they were in the model's, in its weight files under second
#: names (hard links), in copies of these, or each block's in a file of its own.
Weights = Literal["inside", "linked", "copied", "cut"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBlock:
    """A block as it is planned. `border` is what it takes from blocks before it."""

    file: str
    nodes: int
    border: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weight_bytes: int

    def as_json(self) -> dict[str, Any]:
        """As people read it too."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SplitBegins:
    """The first line. `bytes` are all that are to be written, what an earlier run has left included."""

    blocks: tuple[SplitBlock, ...]
    weights: Weights
    bytes: int


@dataclass(frozen=True, slots=True)
class SplitWrites:
    """So many bytes more are written, of this file."""

    file: str
    bytes: int


def encode_begin(begin: SplitBegins) -> str:
    blocks = [block.as_json() for block in begin.blocks]
    return json.dumps({"blocks": blocks, "weights": begin.weights, "bytes": begin.bytes})


def decode_begin(line: bytes) -> SplitBegins:
    """Raises WireError."""
    fields = Fields.parse(line, "the split's first line", WireError)
    blocks = tuple(map(_decoded, fields.nested_list("blocks")))
    weights: Any = fields.text("weights", one_of=get_args(Weights))
    begin = SplitBegins(blocks, weights, fields.integer("bytes"))
    fields.done()
    return begin


def encode_written(written: SplitWrites) -> str:
    return json.dumps(asdict(written))


def decode_written(line: bytes) -> SplitWrites:
    """Raises WireError."""
    fields = Fields.parse(line, "a line of the split", WireError)
    written = SplitWrites(fields.text("file"), fields.integer("bytes"))
    fields.done()
    return written


def _decoded(fields: Fields) -> SplitBlock:
    block = SplitBlock(
        file=fields.text("file"),
        nodes=fields.integer("nodes"),
        border=fields.texts("border"),
        inputs=fields.texts("inputs"),
        outputs=fields.texts("outputs"),
        weight_bytes=fields.integer("weight_bytes"),
    )
    fields.done()
    return block

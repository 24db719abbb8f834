"""What a check tells of each block, from the worker that runs it to the launcher that shows it: one JSON line each."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import WireError
from blockrelay.onnx_blocks.signature import Dimension


@dataclass(frozen=True, slots=True)
class CheckedTensor:
    """An input or an output as its file declares it, and as it was. Empty and None: there was none."""

    name: str
    declared_dtype: str
    declared: Sequence[Dimension] | None
    dtype: str = ""
    shape: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedBlock:
    """A block that was run alone. `problem` is why it did not pass; empty if it did."""

    block: str
    file: str
    problem: str = ""
    load_seconds: float | None = None
    seconds: float | None = None
    """Of the run."""
    nodes: int | None = None
    """Of the graph as the provider runs it; None where ONNX Runtime does not tell, and on the CPU."""
    nodes_on_cpu: int | None = None
    """Of these, those that the device has no kernel for."""
    inputs: Sequence[CheckedTensor] = field(default_factory=tuple[CheckedTensor, ...])
    outputs: Sequence[CheckedTensor] = field(default_factory=tuple[CheckedTensor, ...])

    @property
    def passed(self) -> bool:
        return not self.problem

    def as_json(self) -> dict[str, Any]:
        """As people read it too, with `passed`."""
        return {"block": self.block, "file": self.file, "passed": self.passed, **asdict(self)}


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """What a step of all blocks takes, of as many rows as they were checked with: all `warm`, or each made anew."""

    warm: float
    one_by_one: float


def step_seconds(blocks: Sequence[CheckedBlock]) -> StepSeconds | None:
    """None where a block has not run."""
    runs = [block.seconds for block in blocks if block.seconds is not None]
    loads = [block.load_seconds for block in blocks if block.load_seconds is not None]
    if not len(runs) == len(loads) == len(blocks):
        return None
    return StepSeconds(sum(runs), sum(runs) + sum(loads))


@dataclass(frozen=True, slots=True)
class CheckBegins:
    """The first line: which blocks there are, as (block, file), in order."""

    blocks: tuple[tuple[str, str], ...]


def encode_begin(begin: CheckBegins) -> str:
    return json.dumps({"blocks": [list(one) for one in begin.blocks]})


def decode_begin(line: bytes) -> CheckBegins:
    """Raises WireError."""
    fields = Fields.parse(line, "the check's first line", WireError)
    blocks = fields.take("blocks")
    if not isinstance(blocks, list) or not all(isinstance(one, list) and len(one) == 2 for one in blocks):
        fields.fail("blocks must be pairs")
    return CheckBegins(tuple((str(block), str(file)) for block, file in blocks))


def encode_checked(checked: CheckedBlock) -> str:
    return json.dumps(checked.as_json())


def decode_checked(line: bytes) -> CheckedBlock:
    """Raises WireError."""
    fields = Fields.parse(line, "a line of the check", WireError)
    fields.flag("passed")
    checked = CheckedBlock(
        block=fields.text("block"),
        file=fields.text("file"),
        problem=fields.text("problem"),
        load_seconds=fields.optional_number("load_seconds"),
        seconds=fields.optional_number("seconds"),
        nodes=fields.optional_integer("nodes"),
        nodes_on_cpu=fields.optional_integer("nodes_on_cpu"),
        inputs=tuple(map(_decoded, fields.nested_list("inputs"))),
        outputs=tuple(map(_decoded, fields.nested_list("outputs"))),
    )
    fields.done()
    return checked


def _decoded(fields: Fields) -> CheckedTensor:
    name, declared_dtype, dtype = fields.text("name"), fields.text("declared_dtype"), fields.text("dtype")
    tensor = CheckedTensor(name, declared_dtype, fields.take("declared"), dtype, fields.take("shape"))
    fields.done()
    return tensor


@dataclass(frozen=True, slots=True)
class Described:
    """A folder that services can serve ONNX blocks from, and what no file beside them says, one line each."""

    folder: str
    lacking: tuple[str, ...]


def encode_described(described: Described) -> str:
    return json.dumps({"folder": described.folder, "lacking": list(described.lacking)})


def decode_described(line: bytes) -> Described:
    """Raises WireError for anything else."""
    fields = Fields.parse(line, "what describe says", WireError)
    found = Described(fields.text("folder"), fields.texts("lacking"))
    fields.done()
    return found

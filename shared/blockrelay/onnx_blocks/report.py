"""The results of a check of ONNX blocks, one JSON line each: a worker runs the check, and the launcher shows it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import WireError
from blockrelay.onnx_blocks.signature import Dimension


@dataclass(frozen=True, slots=True)
class CheckedTensor:
    """An input or an output of a block: as its file declares it, and as it was when the block ran."""

    name: str
    declared_dtype: str
    declared: Sequence[Dimension] | None
    """The declared dimensions; None if the file does not even declare their number."""
    dtype: str = ""
    """The actual dtype; empty if the block did not get that far."""
    shape: Sequence[int] | None = None
    """The actual shape; None if the block did not get that far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedBlock:
    """The result of running one block alone."""

    block: str
    """The block's name: block_1."""
    file: str
    problem: str = ""
    """Why the block did not pass; empty if it did."""
    load_seconds: float | None = None
    """Seconds of making the session; None if that failed."""
    seconds: float | None = None
    """Seconds of the run; None if the block did not run."""
    nodes: int | None = None
    """Nodes of the graph as the execution provider runs it; None on the CPU, or if ONNX Runtime does not say."""
    nodes_on_cpu: int | None = None
    """Nodes that the device has no kernel for, so that they run on the CPU."""
    inputs: Sequence[CheckedTensor] = field(default_factory=tuple[CheckedTensor, ...])
    outputs: Sequence[CheckedTensor] = field(default_factory=tuple[CheckedTensor, ...])

    @property
    def passed(self) -> bool:
        return not self.problem

    def as_json(self) -> dict[str, Any]:
        """Returns the fields, with `passed`, as `--json` prints them."""
        return {"block": self.block, "file": self.file, "passed": self.passed, **asdict(self)}


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of one step of all blocks, with the rows that they were checked with."""

    warm: float
    """With a session of every block kept."""
    one_by_one: float
    """With each session made for the step."""


def step_seconds(blocks: Sequence[CheckedBlock]) -> StepSeconds | None:
    """Returns the seconds of one step, summed over the checked blocks; None if a block has not run."""
    runs = [block.seconds for block in blocks if block.seconds is not None]
    loads = [block.load_seconds for block in blocks if block.load_seconds is not None]
    if not len(runs) == len(loads) == len(blocks):
        return None
    return StepSeconds(sum(runs), sum(runs) + sum(loads))


@dataclass(frozen=True, slots=True)
class CheckBegins:
    """The first line of a check: the name and file of each block, in order."""

    blocks: tuple[tuple[str, str], ...]


def encode_begin(begin: CheckBegins) -> str:
    return json.dumps({"blocks": [list(one) for one in begin.blocks]})


def decode_begin(line: bytes) -> CheckBegins:
    """Decodes the first line of a check. Raises WireError."""
    fields = Fields.parse(line, "the check's first line", WireError)
    blocks = fields.take("blocks")
    if not isinstance(blocks, list) or not all(isinstance(one, list) and len(one) == 2 for one in blocks):
        fields.fail("blocks must be pairs")
    return CheckBegins(tuple((str(block), str(file)) for block, file in blocks))


def encode_checked(checked: CheckedBlock) -> str:
    return json.dumps(checked.as_json())


def decode_checked(line: bytes) -> CheckedBlock:
    """Decodes the line about one block. Raises WireError."""
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
    """A folder with a manifest of ONNX blocks, from which services can serve them."""

    folder: str
    lacking: tuple[str, ...]
    """One line for people about each thing that no file beside the blocks says."""


def encode_described(described: Described) -> str:
    return json.dumps({"folder": described.folder, "lacking": list(described.lacking)})


def decode_described(line: bytes) -> Described:
    """Decodes the line that `describe` prints. Raises WireError."""
    fields = Fields.parse(line, "what describe says", WireError)
    described = Described(fields.text("folder"), fields.texts("lacking"))
    fields.done()
    return described

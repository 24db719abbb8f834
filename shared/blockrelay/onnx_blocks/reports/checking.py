"""Reports of `blockrelay check`: the worker runs each block and sends a CheckBegins, then a CheckedBlock for each."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from blockrelay.onnx_blocks.signature import Dimension


@dataclass(frozen=True, slots=True)
class CheckBegins:
    """The first report."""

    blocks: tuple[tuple[str, str], ...]
    """Name and file of each block, in order."""


@dataclass(frozen=True, slots=True)
class CheckedTensor:
    """An input or output of a block: as its file declares it, and as it was in the run."""

    name: str
    declared_dtype: str
    declared: tuple[Dimension, ...] | None
    """None: the file declares no shape."""
    dtype: str = ""
    """Empty: the block did not run."""
    shape: tuple[int, ...] | None = None
    """None: the block did not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedBlock:
    """The result of one block that was run alone."""

    block: str
    file: str
    problem: str = ""
    """Why the block did not pass; empty if it did."""
    load_seconds: float | None = None
    """Duration of loading; None if the block was not loaded."""
    seconds: float | None = None
    """Duration of the run; None if the block did not run."""
    nodes: int | None = None
    """Nodes of the graph that the provider runs; None if ONNX Runtime does not tell, and on the CPU."""
    nodes_on_cpu: int | None = None
    """The number of `nodes` that run on the CPU, because the device has no kernel for them."""
    inputs: tuple[CheckedTensor, ...] = ()
    outputs: tuple[CheckedTensor, ...] = ()

    @property
    def passed(self) -> bool:
        """True if the block ran without a problem."""
        return not self.problem

    def as_json(self) -> dict[str, Any]:
        """Returns the result as `blockrelay check --json` prints it: with `passed`."""
        return {"block": self.block, "file": self.file, "passed": self.passed, **asdict(self)}


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of a step through all blocks, with as many rows as they were checked with."""

    warm: float
    """With all blocks loaded."""
    one_by_one: float
    """With each block loaded for the step."""


def step_seconds(blocks: Sequence[CheckedBlock]) -> StepSeconds | None:
    """Returns the duration of a step; None if a block has not run."""
    runs = [block.seconds for block in blocks if block.seconds is not None]
    loads = [block.load_seconds for block in blocks if block.load_seconds is not None]
    if not len(runs) == len(loads) == len(blocks):
        return None
    return StepSeconds(sum(runs), sum(runs) + sum(loads))

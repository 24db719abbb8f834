"""Which part of the model this worker runs, and what bounds it."""

from dataclasses import dataclass

from blockrelay.protocol.capabilities import Capabilities
from blockrelay.protocol.plan import Device
from blockrelay_worker.scheduling.limits import BatchLimits

#: Share of the limit of a step that a chunk of prompts should take: rows further down a long prompt cost several times
#: those that were measured.
CHUNK_SHARE = 1 / 6


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRole:
    """Stage `stage` (from 0) of `split`: blocks first..last of `blocks`. `worker` is this process's id in the registry.

    A step may last `step_limit_s`, longer where it should by what was measured. `capabilities` are those that it has
    registered. `named_tensors`: stages hand on tensors by name, since these
    are ONNX blocks that others made.
    """

    worker: str
    split: str
    stage: int
    first: int
    last: int
    blocks: int
    capabilities: Capabilities
    device: Device
    max_requests: int
    step_target_s: float
    step_limit_s: float
    speculation: bool
    inexact_sharing: bool = False
    named_tensors: bool = False

    @property
    def gpu_blocks(self) -> tuple[str, ...]:
        """Names of this stage's blocks if they run on a GPU, else nothing."""
        return tuple(f"block_{i}" for i in range(self.first, self.last + 1)) if self.device == "gpu" else ()

    @property
    def limits(self) -> BatchLimits:
        """Of this worker's batches. While requests decode a step has a share of the target: their rows pass all stages
        between two tokens. Guesses are tried only where a row's bits do not depend on its batch, or where they
        may; and not where tensors by name travel, from which the rows of guesses cannot be cut."""
        stages = self.split.count(",") + 1
        exact = self.capabilities.exact or self.inexact_sharing
        cuttable = stages == 1 or not self.named_tensors
        return BatchLimits(
            max_rows=self.capabilities.max_rows,
            max_sequences=self.capabilities.max_sequences,
            ragged=self.capabilities.ragged,
            drafts=self.speculation and exact and cuttable and self.capabilities.ragged,
            step_share_s=self.step_target_s / stages,
            chunk_s=self.step_limit_s * CHUNK_SHARE,
        )

    @property
    def first_stage(self) -> bool:
        return self.first == 1

    @property
    def last_stage(self) -> bool:
        return self.last == self.blocks

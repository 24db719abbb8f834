"""The role of this worker: which part of the model it runs, and the limits of its batches."""

from dataclasses import dataclass

from blockrelay.protocol.capabilities import Capabilities
from blockrelay.protocol.plan import GPU, Device
from blockrelay_worker.policy import CHUNK_SHARE
from blockrelay_worker.scheduling.limits import BatchLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRole:
    """Stage `stage` (from 0) of `split`: blocks `first` to `last` (from 1, both included) of `blocks`."""

    worker_id: str
    """The worker's id in the registry."""
    split: str
    """The blocks of all stages of the model as text, such as `1-3,4-6,7-9`."""
    stage: int
    first: int
    last: int
    blocks: int
    capabilities: Capabilities
    """The capabilities that the worker has registered."""
    device: Device
    max_requests: int
    """Runs on this worker at most."""
    step_target_s: float
    """Seconds that a step should take while requests decode, over all stages together."""
    step_limit_s: float
    """Seconds after which a step counts as stuck; longer for a step that measurements expect to be long."""
    speculation: bool
    """Drafts may be tried."""
    inexact_sharing: bool = False
    """Reuse and drafts are allowed although bits may depend on the batch."""
    named_tensors: bool = False
    """Stages hand on tensors by name, as ONNX blocks of other makers do, and not hidden rows."""

    leaves_without_memory: bool = False
    """Whether the worker leaves its stage when its steps run out of memory, so that the precision may change."""

    @property
    def gpu_blocks(self) -> tuple[str, ...]:
        """Names of this stage's blocks if they run on a GPU, else nothing."""
        return tuple(f"block_{i}" for i in range(self.first, self.last + 1)) if self.device == GPU else ()

    @property
    def limits(self) -> BatchLimits:
        """The limits of this worker's batches.

        While requests decode, a step gets 1/stages of the target time: a token passes all stages. Drafts need rows
        whose bits do not depend on the batch, or permission for inexact sharing. They also need an executor that takes
        ragged batches. They are off if stages hand on named tensors, from which the rows of drafts cannot be cut.
        """
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

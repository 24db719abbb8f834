"""Which part of the model this worker runs, and what bounds it."""

from dataclasses import dataclass

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.settings import Device
from blockrelay.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRole:
    """Stage `stage` (from 0) of `split`: blocks first..last. `worker` is this process's id in the registry."""

    worker: str
    split: str
    stage: int
    first: int
    last: int
    folder: BlockFolder
    tokenizer: Tokenizer | None
    device: Device
    max_rows: int
    max_requests: int
    step_target_s: float
    speculation: bool
    dead_after_s: float

    @property
    def gpu_blocks(self) -> tuple[str, ...]:
        """Names of this stage's blocks if they run on a GPU, else nothing."""
        return tuple(f"block_{i}" for i in range(self.first, self.last + 1)) if self.device == "gpu" else ()

    @property
    def step_share_s(self) -> float:
        """What a step of this stage may take while requests decode: their rows pass all stages between two tokens."""
        return self.step_target_s / (self.split.count(",") + 1)

    @property
    def speculates(self) -> bool:
        """Guessed tokens are tried: only where a row's bits do not depend on its batch."""
        return self.speculation and self.folder.manifest.exact

    @property
    def first_stage(self) -> bool:
        return self.first == 1

    @property
    def last_stage(self) -> bool:
        return self.last == self.folder.model.blocks

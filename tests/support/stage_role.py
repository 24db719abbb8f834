"""A stage as tests run it: what they do not say is the same everywhere."""

from typing import Any

from blockrelay.block_folder.folder import BlockFolder
from blockrelay_worker.engine.stage_role import StageRole

_USUAL: dict[str, Any] = {
    "device": "cpu",
    "max_rows": 64,
    "max_requests": 8,
    "step_target_s": 0.05,
    "speculation": True,
    "dead_after_s": 60,
}


def stage_role(folder: BlockFolder, worker: str, *, split: str, stage: int, **more: Any) -> StageRole:
    """Stage `stage` of `split`; `more`: first and last block, and any other field."""
    return StageRole(
        blocks=folder.model.blocks,
        exact=folder.manifest.exact,
        worker=worker,
        split=split,
        stage=stage,
        **{**_USUAL, **more},
    )

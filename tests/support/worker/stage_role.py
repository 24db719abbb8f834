"""A stage as tests run it: what they do not say is the same everywhere."""

from typing import Any

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.capabilities import Capabilities
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.execution.numerics_id import numerics_id

_USUAL: dict[str, Any] = {
    "device": "cpu",
    "max_requests": 8,
    "step_target_s": 0.05,
    "step_limit_s": 30.0,
    "speculation": True,
}


def stage_role(
    folder: BlockFolder, worker_id: str, *, split: str, stage: int, max_rows: int = 64, **more: Any
) -> StageRole:
    """Stage `stage` of `split`; `more`: first and last block, and any other field."""
    fields = {**_USUAL, **more}
    capabilities = Capabilities(
        exact=folder.manifest.exact,
        ragged=True,
        max_rows=max_rows,
        max_sequences=fields["max_requests"],
        precision=folder.manifest.precision,
        numerics_id=numerics_id(folder.manifest),
        kv_tokens=0,
    )
    fields.setdefault("capabilities", capabilities)
    return StageRole(worker_id=worker_id, split=split, stage=stage, blocks=folder.model.blocks, **fields)

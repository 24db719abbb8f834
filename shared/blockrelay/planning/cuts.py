"""Checks that a model can be cut into the stages of a plan: ONNX blocks made by others cannot be cut everywhere."""

from collections.abc import Sequence

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.onnx_blocks.handed_on import check_borders
from blockrelay.onnx_blocks.served_shape import served_wiring
from blockrelay.protocol.plan import Stage


def check_stages(folder: BlockFolder, stages: Sequence[Stage]) -> None:
    """Raises OnnxBlocksError, with file and tensor, if one of `stages` would have to hand on something that cannot
    travel to another stage.

    It also raises OnnxBlocksError for a `blocks.json` that cannot be read. A single stage, and models without ONNX
    blocks made by others, always pass.
    """
    if folder.model.onnx_blocks is not None and len(stages) > 1:
        check_borders(served_wiring(folder.root), stages, folder.model.max_position)

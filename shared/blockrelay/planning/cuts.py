"""Whether a model can be cut into the stages of a plan: ONNX blocks that others made cannot be cut everywhere."""

from collections.abc import Sequence

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.onnx_blocks.handed_on import check_borders
from blockrelay.onnx_blocks.served_shape import served_wiring
from blockrelay.protocol.plan import Stage


def check_stages(folder: BlockFolder, stages: Sequence[Stage]) -> None:
    """Raises OnnxBlocksError, with file and tensor, where something cannot be handed on from one of the stages."""
    if folder.model.onnx_blocks is not None and len(stages) > 1:
        check_borders(served_wiring(folder.root), stages, folder.model.max_position)

"""The costs of a model's blocks for planners: from its shape, or from the `blocks.json` of ONNX blocks made by others.

No weight is read.
"""

from collections import Counter
from collections.abc import Sequence

from blockrelay.block_folder.analysis import BlockCost, ModelAnalysis, analyse
from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.manifest import ONNX_BLOCKS_NAME
from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.blocks_file import BlockFiles, read_blocks_file
from blockrelay.onnx_blocks.handed_on import bytes_handed_on
from blockrelay.onnx_blocks.wiring import Wiring, wire


def costs_of(folder: BlockFolder) -> ModelAnalysis:
    """Returns the costs of every block of the model in `folder`.

    Raises OnnxBlocksError for a `blocks.json` that cannot be read, and for ONNX blocks that do not fit together.
    """
    if folder.model.onnx_blocks is None:
        return analyse(folder.model)
    return onnx_costs(folder, read_blocks_file(folder.root / ONNX_BLOCKS_NAME))


def onnx_costs(folder: BlockFolder, blocks: Sequence[BlockFiles]) -> ModelAnalysis:
    """Estimates the costs of ONNX blocks made by others, without reading their graphs.

    Bytes are those of a block's files; a file that several blocks share, as `split` leaves them, counts for each with
    an equal part. Every number in the files counts as a weight of a linear layer, and attention as having as many heads
    as the keys have. Raises OnnxBlocksError for blocks that do not fit together.
    """
    model, precision = folder.model, folder.manifest.precision_of(1)
    wiring = wire([block.signature for block in blocks])
    sharing = Counter(name for block in blocks for name in block.files)
    layers = [model.layers_in(index, index) for index in range(1, len(blocks) + 1)]
    costs: list[BlockCost] = []
    for index, (block, own) in enumerate(zip(blocks, layers, strict=True), 1):
        size = sum(file.bytes // sharing[name] for name, file in block.files.items())
        numbers = size // (2 if precision == "fp16" else 4)
        values = own * model.kv_heads * model.head_dim
        row, token = border_bytes(wiring, index)
        costs.append(
            BlockCost(
                index=index,
                layers=own,
                parameters=numbers,
                bytes={precision: size},
                step_bytes={precision: size},
                flops_per_row=2 * numbers,
                attention_flops=4 * values,
                kv_values_per_token=2 * values,
                hop_bytes_per_row=row,
                hop_bytes_per_row_and_token=token,
                cpu_bytes=2 * size if precision == "fp16" else None,  # ONNX Runtime keeps float16 as float32 there
            )
        )
    return ModelAnalysis(model=model.name, context=model.max_position, blocks=tuple(costs))


def border_bytes(wiring: Wiring, last: int) -> tuple[int, int]:
    """Returns what a stage that ends with block `last` sends to the next one for each row: bytes, and further bytes for
    each token that the row attends to, as masks have.

    Both are 0 for the last block, and where the files do not tell the shapes of what is sent. Figures above 0 do not
    mean that a stage may end there: `cuts` checks that.
    """
    try:
        without_past, with_past = (bytes_handed_on(wiring, last, new=1, past=past) for past in (0, 1))
    except OnnxBlocksError:
        return 0, 0
    for_each_token = with_past - without_past
    return without_past - for_each_token, for_each_token

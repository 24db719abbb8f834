"""What every block of a model costs a planner, whatever the model is: from its shape, or from what `blocks.json` says
of ONNX blocks that others made. No weight is read."""

from collections import Counter
from collections.abc import Sequence
from math import prod

import numpy as np

from blockrelay.block_folder.analysis import BlockCost, ModelAnalysis, analyse
from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.manifest import ONNX_BLOCKS_NAME
from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.blocks_file import BlockFiles, read_blocks_file
from blockrelay.onnx_blocks.dimensions import StepSizes, by_place
from blockrelay.onnx_blocks.signature import Tensor
from blockrelay.onnx_blocks.wiring import FromBlock, Wiring, wire


def costs_of(folder: BlockFolder) -> ModelAnalysis:
    """Raises OnnxBlocksError for ONNX blocks that hand on a tensor of which nothing tells how large it is."""
    if folder.model.onnx_blocks is None:
        return analyse(folder.model)
    return onnx_costs(folder, read_blocks_file(folder.root / ONNX_BLOCKS_NAME))


def onnx_costs(folder: BlockFolder, blocks: Sequence[BlockFiles]) -> ModelAnalysis:
    """Bytes are those of a block's files; one that several blocks share, as `split` leaves them, counts for each with
    an equal part. Operations are those of products with all of their numbers, and attention has as many heads as there
    are of keys: the graphs do not tell more without being read."""
    model, precision = folder.model, folder.manifest.precision_of(1)
    wiring = wire([block.signature for block in blocks])
    sharing = Counter(file.name for block in blocks for file in block.files)
    layers = [model.layers_in(index, index) for index in range(1, len(blocks) + 1)]
    costs: list[BlockCost] = []
    for index, (block, own) in enumerate(zip(blocks, layers, strict=True), 1):
        size = sum(file.bytes // sharing[file.name] for file in block.files)
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
                cpu_bytes=2 * size if precision == "fp16" else None,  # ONNX Runtime has float16 in float32 there
            )
        )
    return ModelAnalysis(model=model.name, context=model.max_position, blocks=tuple(costs))


def border_bytes(wiring: Wiring, last: int) -> tuple[int, int]:
    """What a stage that ends with block `last` hands on for each row: bytes, and bytes more for each token that the row
    attends to, as masks have. Raises OnnxBlocksError as `handed_on` does."""
    one, two = (
        sum(prod(shape) * np.dtype(dtype).itemsize for shape, dtype in handed_on(wiring, last, past).values())
        for past in (0, 1)
    )
    return one - (two - one), two - one


def handed_on(wiring: Wiring, last: int, past: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """The tensors that a stage which ends with block `last` hands on of one row behind `past` others, with their shapes
    and types: what later blocks take of it and of the blocks before it. Raises OnnxBlocksError for one whose dimensions
    nothing tells."""
    taken = {
        name
        for block, sources in zip(wiring.blocks, wiring.sources, strict=True)
        for name, source in sources.items()
        if block.index > last and isinstance(source, FromBlock) and source.index <= last
    }
    sizes = StepSizes(batch=1, new=1, past=past)
    return {
        tensor.name: (_shape(block.file, tensor, sizes), tensor.dtype)
        for block in wiring.blocks[:last]
        for tensor in block.outputs
        if tensor.name in taken
    }


def _shape(file: str, tensor: Tensor, sizes: StepSizes) -> tuple[int, ...]:
    """Of a tensor in a step of one request."""
    if tensor.dims is None:
        raise OnnxBlocksError(
            "has no dimensions in its file, not even their number: nothing tells what it takes to hand it on",
            file=file,
            tensor=tensor.name,
        )
    lengths: list[int] = []
    for axis, (dim, usual) in enumerate(zip(tensor.dims, by_place(len(tensor.dims), sizes), strict=True)):
        told = dim if isinstance(dim, int) else sizes.named(dim)
        length = usual if told is None else told
        if length is None:
            raise OnnxBlocksError(f"nothing tells how long dimension {axis} is", file=file, tensor=tensor.name)
        lengths.append(length)
    return tuple(lengths)

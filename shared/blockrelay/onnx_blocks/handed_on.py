"""The named tensors that a stage of ONNX blocks made by others hands on to the next: which, how large, and the limits.

A stage hands on every output of its blocks and of the blocks before it that a later block takes. Their shapes follow
from what the files declare (`dimensions`). All functions are pure.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.dimensions import BlockDimensions, Partial, StepSizes, by_place
from blockrelay.onnx_blocks.served_shape import logits_of, takes_one_sequence
from blockrelay.onnx_blocks.signature import Signature, Tensor, shown
from blockrelay.onnx_blocks.wiring import FromBlock, FromPast, Wiring
from blockrelay.protocol.encoding.codec import ALLOWED_DTYPES
from blockrelay.protocol.encoding.named_tensors import MAX_TENSORS
from blockrelay.protocol.plan import Stage

#: Most bytes that a stage hands on in one step; so one row at the longest context has no more either.
MAX_BYTES = 64 << 20
#: Two numbers of sequences: a side that differs between them has the batch. Models of one sequence have no such side.
_ONE_BY_ONE, _TWO_BATCHES = (1, 1), (2, 5)


@dataclass(frozen=True, slots=True)
class HandedOn:
    """A named tensor that travels between stages."""

    tensor: Tensor
    """The tensor as the block that makes it declares it."""
    maker: Signature
    """The block that makes it."""
    batch_axis: int | None
    """The dimension that is the number of sequences; None if no dimension depends on that."""

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def may_count(self) -> bool:
        """True if the tensor has integers and no batch dimension: its values may depend on the number of sequences, as
        those of a length or a shape do."""
        return self.batch_axis is None and np.dtype(self.tensor.dtype).kind in "iu"


def handed_on(wiring: Wiring, last: int) -> tuple[HandedOn, ...]:
    """Returns the tensors that a stage that ends with block `last` hands on, in the order in which they are made.

    Empty for the last block. Raises OnnxBlocksError, with file and tensor, for a tensor that cannot travel, and for too
    many tensors.
    """
    tensors = _tensors(wiring, last)
    if not tensors:
        return ()
    if len(tensors) > MAX_TENSORS:
        raise wiring.blocks[last - 1].error(
            f"{len(tensors)} tensors would travel behind block_{last}, and a stage hands on {MAX_TENSORS} at most: "
            "end a stage elsewhere"
        )
    for tensor, maker in tensors:
        _check(tensor, maker, last)
    batches = _ONE_BY_ONE if takes_one_sequence(wiring) else _TWO_BATCHES
    few, many = (shapes_handed_on(wiring, last, StepSizes(batch=batch, new=3, past=7)) for batch in batches)
    result: list[HandedOn] = []
    for tensor, maker in tensors:
        sizes = zip(few[tensor.name], many[tensor.name], strict=True)
        axes = [axis for axis, (one, other) in enumerate(sizes) if one != other]
        if len(axes) > 1:
            raise _refused(tensor, maker, f"is {shown(tensor.dims)}, and has the batch in several dimensions")
        result.append(HandedOn(tensor, maker, axes[0] if axes else None))
    return tuple(result)


def shapes_handed_on(wiring: Wiring, last: int, sizes: StepSizes) -> dict[str, tuple[int, ...]]:
    """Returns the shapes, in a step of these sizes, of the tensors that a stage that ends with block `last` hands on.

    Raises OnnxBlocksError for a tensor whose shape does not follow from what the files declare.
    """
    partial, shapes = _partial_shapes(wiring, sizes), dict[str, tuple[int, ...]]()
    for tensor, maker in _tensors(wiring, last):
        known = partial[tensor.name]
        if known is None:
            raise _unknown_rank(tensor, maker, last)
        places = by_place(len(known), sizes)
        shape = [place if size is None else size for size, place in zip(known, places, strict=True)]
        if None in shape:
            axis = shape.index(None)
            raise _refused(tensor, maker, f"is {shown(tensor.dims)}: nothing tells how long dimension {axis} is")
        shapes[tensor.name] = tuple(size for size in shape if size is not None)
    return shapes


def bytes_handed_on(wiring: Wiring, last: int, *, new: int, past: int) -> int:
    """Returns the bytes that a stage that ends with block `last` hands on for one sequence with `new` tokens behind
    `past` others. Raises OnnxBlocksError as `shapes_handed_on` does."""
    return sum(_sizes(wiring, last, new=new, past=past).values())


def row_bytes(wiring: Wiring, last: int, max_position: int) -> int:
    """Returns the most bytes that one row (token) adds to what travels behind block `last`.

    `max_position` is the length of the context in tokens. Raises OnnxBlocksError, with file and tensor, as
    `shapes_handed_on` does, and if one row alone has more bytes than may travel in a step (MAX_BYTES).
    """
    alone = _sizes(wiring, last, new=1, past=max_position - 1)
    prompt = _sizes(wiring, last, new=max_position, past=0)
    each = {name: max(size, -(-prompt[name] // max_position)) for name, size in alone.items()}
    total = sum(each.values())
    if total > MAX_BYTES:
        largest = max(each, key=each.__getitem__)
        tensor, maker = next((tensor, maker) for tensor, maker in _tensors(wiring, last) if tensor.name == largest)
        raise _refused(
            tensor,
            maker,
            f"takes {each[largest]:,} bytes for one row of a context of {max_position:,} positions, of {total:,} that "
            f"would travel behind block_{last}, where {MAX_BYTES >> 20} MiB may: end a stage elsewhere, or serve "
            "a shorter context (--max-position)",
        )
    return total


def max_rows(wiring: Wiring, stage: Stage, max_position: int, most: int) -> int:
    """Returns the number of rows (tokens) that a step of the stage may have, `most` at most.

    With that many rows, neither what the stage takes nor what it hands on exceeds MAX_BYTES, at any context up to
    `max_position` tokens. Raises as `row_bytes` does.
    """
    borders = [border for border in (stage.first - 1, stage.last) if 0 < border < len(wiring.blocks)]
    limit = most
    for border in borders:
        if each := row_bytes(wiring, border, max_position):
            limit = min(limit, MAX_BYTES // each)
    return limit


def check_borders(wiring: Wiring, stages: Sequence[Stage], max_position: int) -> None:
    """Raises OnnxBlocksError, with file and tensor, if the blocks cannot be cut into `stages`.

    `max_position` is the context in tokens, for which a row must fit into MAX_BYTES.
    """
    for stage in stages:
        for border in (stage.first - 1, stage.last):
            if 0 < border < len(wiring.blocks):
                handed_on(wiring, border)
                row_bytes(wiring, border, max_position)
        _check_pasts(wiring, stage)
        maker, logits = logits_of(wiring)
        if stage.first <= maker.index <= stage.last < len(wiring.blocks):
            raise maker.error(f"is made by {maker.block}: those behind it must be in its stage", logits.name)


def _check_pasts(wiring: Wiring, stage: Stage) -> None:
    """Raises OnnxBlocksError if a block of `stage` takes the past of a layer whose present another stage makes."""
    for index in range(stage.first, stage.last + 1):
        for name, source in wiring.sources[index - 1].items():
            if isinstance(source, FromPast):
                maker = wiring.blocks[wiring.presents[source.slot].index - 1]
                if not stage.first <= maker.index <= stage.last:
                    raise wiring.blocks[index - 1].error(
                        f"is {source.slot}, which {maker.file} makes: both must be in one stage", name
                    )


def _tensors(wiring: Wiring, last: int) -> list[tuple[Tensor, Signature]]:
    """Returns the outputs of the blocks up to `last` that a later block takes, each with the block that makes it."""
    taken = {
        name
        for sources in wiring.sources[last:]
        for name, source in sources.items()
        if isinstance(source, FromBlock) and source.index <= last
    }
    return [(tensor, block) for block in wiring.blocks[:last] for tensor in block.outputs if tensor.name in taken]


def _check(tensor: Tensor, maker: Signature, last: int) -> None:
    """Raises OnnxBlocksError for a tensor of unknown rank, or of a dtype that does not travel."""
    if tensor.dims is None:
        raise _unknown_rank(tensor, maker, last)
    try:
        travels = np.dtype(tensor.dtype).str in ALLOWED_DTYPES
    except TypeError:
        travels = False
    if not travels:
        names = ", ".join(sorted(np.dtype(one).name for one in ALLOWED_DTYPES))
        raise _refused(tensor, maker, f"is {tensor.dtype}, and what travels between stages is one of {names}")


def _partial_shapes(wiring: Wiring, sizes: StepSizes) -> dict[str, Partial | None]:
    """Returns the known sides of every output's shape, from the block that makes it or else from those that take it."""
    shapes: dict[str, Partial | None] = {}
    for block, sources in zip(wiring.blocks, wiring.sources, strict=True):
        dimensions = BlockDimensions(block.file, sizes)
        for tensor in block.inputs:
            source = sources[tensor.name]
            made = shapes.get(tensor.name) if isinstance(source, FromBlock) else None
            whole = None if made is None or None in made else tuple(size for size in made if size is not None)
            # A tensor that does not travel may stay unknown; for one that does, `shapes_handed_on` raises the error.
            with suppress(OnnxBlocksError):
                shape = dimensions.of_input(tensor, source, whole)
                if isinstance(source, FromBlock) and made is not None and len(made) == len(shape):
                    shapes[tensor.name] = tuple(
                        size if known is None else known for size, known in zip(shape, made, strict=True)
                    )
        shapes |= {tensor.name: dimensions.of_output(tensor) for tensor in block.outputs}
    return shapes


def _sizes(wiring: Wiring, last: int, *, new: int, past: int) -> Mapping[str, int]:
    """Returns the bytes of each tensor that travels behind block `last`, for one sequence."""
    shapes = shapes_handed_on(wiring, last, StepSizes(batch=1, new=new, past=past))
    return {
        tensor.name: math.prod(shapes[tensor.name]) * np.dtype(tensor.dtype).itemsize
        for tensor, _ in _tensors(wiring, last)
    }


def _unknown_rank(tensor: Tensor, maker: Signature, last: int) -> OnnxBlocksError:
    return _refused(
        tensor,
        maker,
        f"is of unknown dimensions (a dynamic rank), and would travel behind block_{last}: export it with its shape, "
        "or end a stage elsewhere",
    )


def _refused(tensor: Tensor, maker: Signature, message: str) -> OnnxBlocksError:
    return maker.error(message, tensor.name)

"""What a stage of ONNX blocks that others made hands on to later ones: which tensors, how large they are, and how much
is too much. Pure.

Behind a stage travels, by name, every output of its blocks and of those before it that a later block takes. How long
their sides are follows from what the files declare (`dimensions`).
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

#: Of what a stage hands on in one step, and so of one row at the longest context.
MAX_BYTES = 64 << 20
_ONE_BY_ONE, _TWO_BATCHES = (1, 1), (2, 5)


@dataclass(frozen=True, slots=True)
class HandedOn:
    """A tensor that travels between stages, as its `maker` declares it. `batch_axis`: the side that is as long as there
    are sequences; None: no side depends on that."""

    tensor: Tensor
    maker: Signature
    batch_axis: int | None

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def may_count(self) -> bool:
        """It is an integer that may have the number of sequences in it, such as a length or a shape."""
        return self.batch_axis is None and np.dtype(self.tensor.dtype).kind in "iu"


def handed_on(wiring: Wiring, last: int) -> tuple[HandedOn, ...]:
    """What a stage that ends with block `last` hands on, in the order in which it is made; nothing behind the last one.

    Raises OnnxBlocksError, with file and tensor, for what cannot travel.
    """
    tensors = _tensors(wiring, last)
    if not tensors:
        return ()
    if len(tensors) > MAX_TENSORS:
        raise OnnxBlocksError(
            f"{len(tensors)} tensors would travel behind {_block(last)}, and a stage hands on {MAX_TENSORS} at most: "
            "end a stage elsewhere",
            file=wiring.blocks[last - 1].file,
        )
    for tensor, maker in tensors:
        _check(tensor, maker, last)
    batches = _ONE_BY_ONE if takes_one_sequence(wiring) else _TWO_BATCHES
    few, many = (shapes_handed_on(wiring, last, StepSizes(batch=batch, new=3, past=7)) for batch in batches)
    found: list[HandedOn] = []
    for tensor, maker in tensors:
        axes = [at for at, (one, two) in enumerate(zip(few[tensor.name], many[tensor.name], strict=True)) if one != two]
        if len(axes) > 1:
            raise _refused(tensor, maker, f"is {shown(tensor.dims)}, and has the batch in several dimensions")
        found.append(HandedOn(tensor, maker, axes[0] if axes else None))
    return tuple(found)


def shapes_handed_on(wiring: Wiring, last: int, sizes: StepSizes) -> dict[str, tuple[int, ...]]:
    """The shape in such a step of each tensor that a stage hands on that ends with block `last`. Raises OnnxBlocksError
    for one that nothing tells."""
    told, found = _told(wiring, sizes), dict[str, tuple[int, ...]]()
    for tensor, maker in _tensors(wiring, last):
        known = told[tensor.name]
        if known is None:
            raise _unknown_rank(tensor, maker, last)
        places = by_place(len(known), sizes)
        shape = [place if size is None else size for size, place in zip(known, places, strict=True)]
        if None in shape:
            at = shape.index(None)
            raise _refused(tensor, maker, f"is {shown(tensor.dims)}: nothing tells how long dimension {at} is")
        found[tensor.name] = tuple(size for size in shape if size is not None)
    return found


def bytes_handed_on(wiring: Wiring, last: int, *, new: int, past: int) -> int:
    """Of one sequence with `new` rows behind `past` others, behind block `last`."""
    return sum(_sizes(wiring, last, new=new, past=past).values())


def row_bytes(wiring: Wiring, last: int, max_position: int) -> int:
    """What one row adds, at most, to what travels behind block `last`, in a context of `max_position` positions.

    Raises OnnxBlocksError, with file and tensor, for more than may travel in a step.
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
            f"would travel behind {_block(last)}, where {MAX_BYTES >> 20} MiB may: end a stage elsewhere, or serve "
            "a shorter context (--max-position)",
        )
    return total


def most_rows(wiring: Wiring, stage: Stage, max_position: int, most: int) -> int:
    """How many rows a step of the stage may have, up to `most`, so that neither what it takes nor what it hands on is
    too much, whatever stands before the rows. Raises as `row_bytes` does."""
    borders = [border for border in (stage.first - 1, stage.last) if 0 < border < len(wiring.blocks)]
    found = most
    for border in borders:
        if each := row_bytes(wiring, border, max_position):
            found = min(found, MAX_BYTES // each)
    return found


def check_borders(wiring: Wiring, stages: Sequence[Stage], max_position: int) -> None:
    """Raises OnnxBlocksError, with file and tensor, where these blocks cannot be cut into these stages, which are all
    that there are, or some of them."""
    for stage in stages:
        for border in (stage.first - 1, stage.last):
            if 0 < border < len(wiring.blocks):
                handed_on(wiring, border)
                row_bytes(wiring, border, max_position)
        _check_pasts(wiring, stage)
        maker, logits = logits_of(wiring)
        if stage.first <= maker.index <= stage.last < len(wiring.blocks):
            raise OnnxBlocksError(
                f"is made by {maker.block}: those behind it must be in its stage", file=maker.file, tensor=logits.name
            )


def _check_pasts(wiring: Wiring, stage: Stage) -> None:
    """The KV of a layer is in the stage of the block that makes it."""
    for index in range(stage.first, stage.last + 1):
        for name, source in wiring.sources[index - 1].items():
            if isinstance(source, FromPast):
                maker = wiring.blocks[wiring.presents[source.slot].index - 1]
                if not stage.first <= maker.index <= stage.last:
                    raise OnnxBlocksError(
                        f"is {source.slot}, which {maker.file} makes: both must be in one stage",
                        file=wiring.blocks[index - 1].file,
                        tensor=name,
                    )


def _tensors(wiring: Wiring, last: int) -> list[tuple[Tensor, Signature]]:
    """Outputs of the blocks up to `last` that a later block takes, each with its maker."""
    taken = {
        name
        for sources in wiring.sources[last:]
        for name, source in sources.items()
        if isinstance(source, FromBlock) and source.index <= last
    }
    return [(tensor, block) for block in wiring.blocks[:last] for tensor in block.outputs if tensor.name in taken]


def _check(tensor: Tensor, maker: Signature, last: int) -> None:
    if tensor.dims is None:
        raise _unknown_rank(tensor, maker, last)
    try:
        travels = np.dtype(tensor.dtype).str in ALLOWED_DTYPES
    except TypeError:
        travels = False
    if not travels:
        names = ", ".join(sorted(np.dtype(one).name for one in ALLOWED_DTYPES))
        raise _refused(tensor, maker, f"is {tensor.dtype}, and what travels between stages is one of {names}")


def _told(wiring: Wiring, sizes: StepSizes) -> dict[str, Partial | None]:
    """What is told of the shape of every output: by the block that makes it, or else by those that take it."""
    found: dict[str, Partial | None] = {}
    for block, sources in zip(wiring.blocks, wiring.sources, strict=True):
        dimensions = BlockDimensions(block.file, sizes)
        for tensor in block.inputs:
            source = sources[tensor.name]
            told = found.get(tensor.name) if isinstance(source, FromBlock) else None
            whole = None if told is None or None in told else tuple(size for size in told if size is not None)
            with suppress(OnnxBlocksError):  # what does not travel needs no size, and what does is asked for then
                shape = dimensions.of_input(tensor, source, whole)
                if isinstance(source, FromBlock) and told is not None and len(told) == len(shape):
                    found[tensor.name] = tuple(
                        one if known is None else known for one, known in zip(shape, told, strict=True)
                    )
        found |= {tensor.name: dimensions.of_output(tensor) for tensor in block.outputs}
    return found


def _sizes(wiring: Wiring, last: int, *, new: int, past: int) -> Mapping[str, int]:
    shapes = shapes_handed_on(wiring, last, StepSizes(batch=1, new=new, past=past))
    return {
        tensor.name: math.prod(shapes[tensor.name]) * np.dtype(tensor.dtype).itemsize
        for tensor, _ in _tensors(wiring, last)
    }


def _unknown_rank(tensor: Tensor, maker: Signature, last: int) -> OnnxBlocksError:
    return _refused(
        tensor,
        maker,
        f"is of unknown dimensions (a dynamic rank), and would travel behind {_block(last)}: export it with its shape, "
        "or end a stage elsewhere",
    )


def _refused(tensor: Tensor, maker: Signature, message: str) -> OnnxBlocksError:
    return OnnxBlocksError(message, file=maker.file, tensor=tensor.name)


def _block(index: int) -> str:
    return f"block_{index}"

"""Connects ONNX blocks by the names of their inputs and outputs. Nothing about Llama is assumed.

Each input has one source: the request, the output of the same name of an earlier block, or the session's KV. The
present of one step is the past of the next one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from blockrelay.onnx_blocks.cache_names import CacheSlot, cache_slot
from blockrelay.onnx_blocks.signature import Signature, Tensor, shown

#: Inputs that a request brings, each [batch, new positions]; attention_mask is [batch, past and new positions].
REQUEST_INPUTS = ("input_ids", "attention_mask", "position_ids")
_REQUEST_DTYPES, _REQUEST_RANK = ("int64", "int32"), 2


@dataclass(frozen=True, slots=True)
class FromRequest:
    """A source: the request's input of the same name."""


@dataclass(frozen=True, slots=True)
class FromBlock:
    """A source: the output of the same name of an earlier block."""

    index: int
    """The number of that block; the first is 1."""


@dataclass(frozen=True, slots=True)
class FromPast:
    """A source: the KV that a session keeps of the steps before, which is empty in the first step."""

    slot: CacheSlot


Source = FromRequest | FromBlock | FromPast


@dataclass(frozen=True, slots=True)
class Present:
    """The output of a block that becomes the past of the next step."""

    index: int
    """The number of the block; the first is 1."""
    name: str


@dataclass(frozen=True, slots=True)
class Wiring:
    """The blocks of a model in the order in which they run, and the source of each input."""

    blocks: tuple[Signature, ...]
    sources: tuple[Mapping[str, Source], ...]
    """For each block, the source of each of its inputs by name."""
    presents: Mapping[CacheSlot, Present]

    def consumed(self) -> frozenset[str]:
        """Returns the names of the outputs that a later block takes."""
        return frozenset(
            name for inputs in self.sources for name, source in inputs.items() if isinstance(source, FromBlock)
        )


@dataclass(slots=True)
class _Made:
    """The outputs of the blocks that were wired so far."""

    by: dict[str, tuple[Signature, Tensor]] = field(default_factory=dict[str, tuple[Signature, Tensor]])
    """The block and the declaration of each output, by its name."""
    presents: dict[CacheSlot, Present] = field(default_factory=dict[CacheSlot, Present])


def wire(blocks: Sequence[Signature]) -> Wiring:
    """Finds the source of every input of `blocks`, which are in the order in which they run and numbered from 1.

    Raises OnnxBlocksError, with file and tensor, unless every tensor has one source, every past its present and every
    present its past, and all blocks declare a tensor alike. Request inputs must be int64 or int32 with two dimensions,
    caches must have four. A file may leave the number of dimensions undeclared.
    """
    made = _Made()
    made_later = {tensor.name: block for block in reversed(blocks) for tensor in block.outputs}
    sources: list[Mapping[str, Source]] = []
    pasts: dict[CacheSlot, tuple[Signature, Tensor]] = {}
    for block in blocks:
        sources.append({tensor.name: _source(block, tensor, made, made_later, pasts) for tensor in block.inputs})
        for tensor in block.outputs:
            _add(block, tensor, made)
    for slot, present in made.presents.items():
        if slot not in pasts:
            raise blocks[present.index - 1].error(f"is {slot}, and no block takes its past", present.name)
        past_of, past = pasts[slot]
        made_by, tensor = made.by[present.name]
        _check_cache(past_of, past, made_by, tensor)
    for slot, (block, tensor) in pasts.items():
        if slot not in made.presents:
            raise block.error(f"is {slot} so far, and no block gives its present", tensor.name)
    return Wiring(blocks=tuple(blocks), sources=tuple(sources), presents=made.presents)


def _source(
    block: Signature,
    tensor: Tensor,
    made: _Made,
    made_later: Mapping[str, Signature],
    pasts: dict[CacheSlot, tuple[Signature, Tensor]],
) -> Source:
    """Returns the source of one input of `block`; adds it to `pasts` if it is a past. Raises OnnxBlocksError."""
    if tensor.name in REQUEST_INPUTS:
        _check_request(block, tensor)
        return FromRequest()
    if (slot := cache_slot(tensor, "past", file=block.file)) is not None:
        other, same = pasts.setdefault(slot, (block, tensor))
        _check_same(other, same, block, tensor)
        return FromPast(slot)
    if tensor.name in made.by:
        maker, output = made.by[tensor.name]
        _check_same(maker, output, block, tensor)
        return FromBlock(maker.index)
    if (later := made_later.get(tensor.name)) is not None:
        which = "itself" if later is block else f"{later.file}, which comes later"
        raise block.error(f"is made only by {which}: blocks run in order", tensor.name)
    raise block.error(
        f"has no source: neither the request ({', '.join(REQUEST_INPUTS)}) nor an earlier block has it", tensor.name
    )


def _add(block: Signature, tensor: Tensor, made: _Made) -> None:
    """Adds one output of `block` to `made`. Raises OnnxBlocksError if its name has another source."""
    if tensor.name in REQUEST_INPUTS:
        raise block.error("has two sources: the request brings it too", tensor.name)
    if tensor.name in made.by:
        other = made.by[tensor.name][0].file
        raise block.error(f"has two sources: {other} makes it too", tensor.name)
    if cache_slot(tensor, "past", file=block.file) is not None:
        raise block.error("is an output that is called like a past", tensor.name)
    made.by[tensor.name] = block, tensor
    if (slot := cache_slot(tensor, "present", file=block.file)) is not None:
        other = made.presents.setdefault(slot, Present(block.index, tensor.name))
        if other.name != tensor.name:
            raise block.error(f"is {slot}, and so is {other.name}", tensor.name)


def _check_request(block: Signature, tensor: Tensor) -> None:
    if tensor.dtype not in _REQUEST_DTYPES:
        raise block.error(f"is {tensor.dtype}, and a request brings {' or '.join(_REQUEST_DTYPES)}", tensor.name)
    if tensor.rank not in (_REQUEST_RANK, None):
        raise block.error(
            f"has {tensor.rank} dimensions, and a request brings {_REQUEST_RANK}: batch and positions", tensor.name
        )


def _check_same(maker: Signature, output: Tensor, block: Signature, tensor: Tensor) -> None:
    """Raises OnnxBlocksError if two files declare one tensor differently. What only one declares is not compared."""
    if tensor.dtype != output.dtype:
        raise block.error(f"is {tensor.dtype}, and {maker.file} has it as {output.dtype}", tensor.name)
    if tensor.dims is None or output.dims is None:
        return
    pairs = zip_longest(tensor.dims, output.dims)
    if any(_differ(one, other) for one, other in pairs):
        raise block.error(f"is {shown(tensor.dims)}, and {maker.file} has it as {shown(output.dims)}", tensor.name)


def _check_cache(block: Signature, past: Tensor, maker: Signature, present: Tensor) -> None:
    """Raises OnnxBlocksError unless a present can be the next step's past: alike but for the dimension of positions."""
    if past.dtype != present.dtype:
        raise block.error(
            f"is {past.dtype}, and its present {present.name} in {maker.file} is {present.dtype}", past.name
        )
    if past.dims is not None and present.dims is not None:
        pairs = list(zip(past.dims, present.dims, strict=True))
        differing = [pair for pair in pairs if _differ(*pair)]
        open_ = any(
            isinstance(one, str) for pair in pairs[1:] for one in pair
        )  # then the open dimension is that of positions
        if len(differing) > (0 if open_ else 1):
            raise block.error(
                f"is {shown(past.dims)}, and its present {present.name} in {maker.file} is {shown(present.dims)}",
                past.name,
            )


def _differ(one: int | str | None, other: int | str | None) -> bool:
    """Returns whether two declared dimensions contradict each other. None stands for a missing dimension.

    Names never contradict each other, because each file has its own.
    """
    return one is None or other is None or (isinstance(one, int) and isinstance(other, int) and one != other)

"""Computes the shapes of a block's tensors in one step, where its graph leaves dimensions open.

For each dimension of an input the first of these that gives a size counts: the known shape of a request's input or a
past; a number in the file; a well-known name (`batch_size`, `past_sequence_length + sequence_length`); the same name
elsewhere in the block; the shape that the earlier block gave; and last the place in the tensor: [new],
[batch, new], [batch, new, not known] or [batch, 1, new, past and new].
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.signature import Dimension, Tensor, shown
from blockrelay.onnx_blocks.wiring import FromPast, FromRequest, Source

#: Names that exporters give dimensions, in lower case.
_BATCH = {"batch", "batch_size", "b"}
_NEW = {"sequence_length", "seq_length", "seq_len", "sequence", "seq", "s"}
_PAST = {"past_sequence_length", "past_seq_length", "past_seq_len", "past_length", "past_len", "past", "p"}
_TOTAL = {"total_sequence_length", "total_seq_length", "total_seq_len", "total_length", "total_len", "total", "t"}
#: A shape with None for each dimension that is not known.
Partial = tuple[int | None, ...]
#: The dimension of positions in a cache [batch, heads, positions, head_dim], if its names do not show it.
_POSITIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """The sizes of one step of a batch of sequences."""

    batch: int
    """Number of sequences."""
    new: int
    """New tokens of each sequence."""
    past: int
    """Tokens of each sequence before the new ones."""

    @property
    def total(self) -> int:
        """Tokens of each sequence after the step."""
        return self.past + self.new

    def named(self, name: str) -> int | None:
        """Returns the size of a dimension called `name`, which may be a sum of names; None for an unknown name."""
        words = [word.strip().lower() for word in name.split("+")]
        if len(words) == 2 and words[0] in _PAST and words[1] == "1":
            return self.total  # exporters that assume one new token call the total "past + 1"
        parts = [self._word(word) for word in words]
        return sum(part for part in parts if part is not None) if None not in parts else None

    def _word(self, word: str) -> int | None:
        for words, size in ((_BATCH, self.batch), (_NEW, self.new), (_PAST, self.past), (_TOTAL, self.total)):
            if word in words:
                return size
        return int(word) if word.isascii() and word.isdigit() and len(word) < 10 else None


@dataclass(slots=True)
class BlockDimensions:
    """The shapes of one block's tensors in one step.

    Remembers the size of each named dimension: all tensors of the block's file have to agree on it.
    """

    file: str
    """Names the block in messages."""
    sizes: StepSizes
    _bound: dict[str, int] = field(default_factory=dict[str, int])

    def of_input(self, tensor: Tensor, source: Source, given: Sequence[int] | None = None) -> tuple[int, ...]:
        """Returns the shape of an input. `given` is the shape that the block which makes the tensor gave, if known.

        Raises OnnxBlocksError for a shape that contradicts `given` or the sizes of the step, or that cannot be found.
        """
        dims = tensor.dims if tensor.dims is not None else tuple("" for _ in given or ())
        if tensor.dims is None and given is None:
            raise self._error(tensor, "declares no dimensions")
        if given is not None and len(given) != len(dims):
            raise self._error(tensor, f"is {shown(dims)}, and the block that makes it gave {shown(given)}")
        known = self._known(tensor, source, dims)
        places = by_place(len(dims), self.sizes)
        shape: list[int] = []
        for axis, dim in enumerate(dims):
            size = known[axis]
            if size is None:
                size = self._declared(dim)
                if size is None:
                    size = given[axis] if given is not None else places[axis]
                if size is None:
                    raise self._error(tensor, f"is {shown(dims)}: nothing tells how long dimension {axis} is")
            elif isinstance(dim, int) and dim != size:
                raise self._error(tensor, f"is {shown(dims)}, which is none of {self._step()}")
            self._bind(dim, size)
            shape.append(size)
        if given is not None and tuple(given) != tuple(shape):
            raise self._error(tensor, f"is {shown(shape)} here, and the block that makes it gave {shown(given)}")
        return tuple(shape)

    def of_output(self, tensor: Tensor) -> Partial | None:
        """Returns the shape of an output as far as its file declares it; None if not even the number of dimensions.

        Called after `of_input` for the block's inputs, which binds the names of dimensions.
        """
        return None if tensor.dims is None else tuple(self._declared(dim) for dim in tensor.dims)

    def contradiction(self, tensor: Tensor, actual: Sequence[int], *, is_present: bool) -> str:
        """Returns how the shape `actual` of an output contradicts what its file declares; "" if it does not.

        `is_present`: the output is a present, whose positions are the past and the new ones. Names of dimensions that
        have no size yet get that of `actual`. Called after `of_input` for the block's inputs.
        """
        if tensor.dims is None:
            return ""
        if len(actual) != len(tensor.dims):
            return f"{tensor.name}: is {shown(actual)}, and the file declares {shown(tensor.dims)}"
        positions = _positions(tensor.dims) if is_present else None
        for axis, (dim, size) in enumerate(zip(tensor.dims, actual, strict=True)):
            open_positions = axis == positions and not isinstance(dim, int)
            expected = self.sizes.total if open_positions else self._declared(dim)
            if expected is None:
                self._bind(dim, size)
            elif expected != size:
                why = f", where {dim} is {expected}" if isinstance(dim, str) else ""
                return f"{tensor.name}: is {shown(actual)}, and the file declares {shown(tensor.dims)}{why}"
        return ""

    def _known(self, tensor: Tensor, source: Source, dims: Sequence[Dimension]) -> list[int | None]:
        """Returns the sizes that a request's input or a past must have; None for dimensions that it leaves open."""
        sizes = self.sizes
        match source:
            case FromRequest():
                return [sizes.batch, sizes.total if tensor.name == "attention_mask" else sizes.new]
            case FromPast():
                known: list[int | None] = [sizes.batch, *(None for _ in dims[1:])]
                known[_positions(dims)] = sizes.past
                return known
            case _:
                return [None for _ in dims]

    def _declared(self, dim: Dimension) -> int | None:
        """Returns the size of a declared dimension: a number, a well-known name, or a name that is bound; else None."""
        if isinstance(dim, int):
            return dim
        named = self.sizes.named(dim)
        return self._bound.get(dim) if named is None else named

    def _bind(self, dim: Dimension, size: int) -> None:
        if isinstance(dim, str) and dim:
            self._bound.setdefault(dim, size)

    def _step(self) -> str:
        return f"batch {self.sizes.batch}, sequence {self.sizes.new} and past {self.sizes.past}"

    def _error(self, tensor: Tensor, message: str) -> OnnxBlocksError:
        return OnnxBlocksError(message, file=self.file, tensor=tensor.name)


def _positions(dims: Sequence[Dimension]) -> int:
    """Returns the dimension of positions in a cache: the one that is called so, else the only open one, else 2."""
    inner = range(1, len(dims))
    probe = StepSizes(batch=0, new=1, past=2)
    by_name = [axis for axis in inner if isinstance(dim := dims[axis], str) and probe.named(dim)]
    open_axes = [axis for axis in inner if isinstance(dims[axis], str)]
    for axes in (by_name, open_axes):
        if len(axes) == 1:
            return axes[0]
    return _POSITIONS


def by_place(rank: int, sizes: StepSizes) -> list[int | None]:
    """Returns the sizes that a tensor of this rank usually has, for open dimensions; None for those not known."""
    new, total = sizes.new, sizes.total
    places: dict[int, list[int | None]] = {
        1: [new],
        2: [sizes.batch, new],
        3: [sizes.batch, new, None],
        4: [sizes.batch, 1, new, total],
    }
    return places.get(rank, [None] * rank)

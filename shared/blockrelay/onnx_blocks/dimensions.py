"""How long each side of a block's tensors is in one step: what graphs leave open has a name that people know, or else
follows from what the tensor is.

For an input the first of these counts that says something: what a request or a past is, a number, a name that is known
(`batch_size`, `past_sequence_length + sequence_length`), the same name elsewhere in the block, what the earlier block
gave, and last the place in the tensor: [batch, new], [batch, new, ...], [batch, 1, new, past and new].
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.signature import Dimension, Tensor, shown
from blockrelay.onnx_blocks.wiring import FromPast, FromRequest, Source

_BATCH = {"batch", "batch_size", "b"}
_NEW = {"sequence_length", "seq_length", "seq_len", "sequence", "seq", "s"}
_PAST = {"past_sequence_length", "past_seq_length", "past_seq_len", "past_length", "past_len", "past", "p"}
_TOTAL = {"total_sequence_length", "total_seq_length", "total_seq_len", "total_length", "total_len", "total", "t"}
#: A shape as far as it is known.
Partial = tuple[int | None, ...]
#: The dimension of positions in a cache [batch, heads, positions, head_dim], where nothing else tells.
_POSITIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """Of one step: rows of the batch, new tokens of each, tokens before them."""

    batch: int
    new: int
    past: int

    @property
    def total(self) -> int:
        return self.past + self.new

    def named(self, name: str) -> int | None:
        """What a dimension of that name is; None for a name that nobody knows. Sums are understood."""
        words = [word.strip().lower() for word in name.split("+")]
        if len(words) == 2 and words[0] in _PAST and words[1] == "1":
            return self.total  # so exporters call it that had one new token in mind
        parts = [self._word(word) for word in words]
        return sum(part for part in parts if part is not None) if None not in parts else None

    def _word(self, word: str) -> int | None:
        for words, size in ((_BATCH, self.batch), (_NEW, self.new), (_PAST, self.past), (_TOTAL, self.total)):
            if word in words:
                return size
        return int(word) if word.isascii() and word.isdigit() and len(word) < 10 else None


@dataclass(slots=True)
class BlockDimensions:
    """What the names of dimensions in one block's file are in one step, as far as tensors have told."""

    file: str
    sizes: StepSizes
    _found: dict[str, int] = field(default_factory=dict[str, int])

    def of_input(self, tensor: Tensor, source: Source, given: Sequence[int] | None = None) -> tuple[int, ...]:
        """The shape to feed. `given` is what the block gave that makes the tensor, if it is known.

        Raises OnnxBlocksError for one that contradicts that, or the sizes of the step, and for one that nothing tells.
        """
        dims = tensor.dims if tensor.dims is not None else tuple("" for _ in given or ())
        if tensor.dims is None and given is None:
            raise self._error(tensor, "declares no dimensions")
        if given is not None and len(given) != len(dims):
            raise self._error(tensor, f"is {shown(dims)}, and the block that makes it gave {shown(given)}")
        meant = self._meant(tensor, source, dims)
        places = by_place(len(dims), self.sizes)
        shape: list[int] = []
        for axis, dim in enumerate(dims):
            size = meant[axis]
            if size is None:
                size = self._told(dim)
                if size is None:
                    size = given[axis] if given is not None else places[axis]
                if size is None:
                    raise self._error(tensor, f"is {shown(dims)}: nothing tells how long dimension {axis} is")
            elif isinstance(dim, int) and dim != size:
                raise self._error(tensor, f"is {shown(dims)}, which is none of {self._asked()}")
            self._bind(dim, size)
            shape.append(size)
        if given is not None and tuple(given) != tuple(shape):
            raise self._error(tensor, f"is {shown(shape)} here, and the block that makes it gave {shown(given)}")
        return tuple(shape)

    def of_output(self, tensor: Tensor) -> Partial | None:
        """What the file tells of an output before it is made, once its inputs are known; None: not even its rank."""
        return None if tensor.dims is None else tuple(self._told(dim) for dim in tensor.dims)

    def contradiction(self, tensor: Tensor, actual: Sequence[int], *, is_present: bool) -> str:
        """What is wrong with the shape of an output; empty if it is as declared."""
        if tensor.dims is None:
            return ""
        if len(actual) != len(tensor.dims):
            return f"{tensor.name}: is {shown(actual)}, and the file declares {shown(tensor.dims)}"
        positions = _positions(tensor.dims) if is_present else None
        for axis, (dim, size) in enumerate(zip(tensor.dims, actual, strict=True)):
            open_positions = axis == positions and not isinstance(dim, int)
            expected = self.sizes.total if open_positions else self._told(dim)
            if expected is None:
                self._bind(dim, size)
            elif expected != size:
                why = f", where {dim} is {expected}" if isinstance(dim, str) else ""
                return f"{tensor.name}: is {shown(actual)}, and the file declares {shown(tensor.dims)}{why}"
        return ""

    def _meant(self, tensor: Tensor, source: Source, dims: Sequence[Dimension]) -> list[int | None]:
        """What a request or a past has there; None: whatever else tells."""
        sizes = self.sizes
        match source:
            case FromRequest():
                return [sizes.batch, sizes.total if tensor.name == "attention_mask" else sizes.new]
            case FromPast():
                meant: list[int | None] = [sizes.batch, *(None for _ in dims[1:])]
                meant[_positions(dims)] = sizes.past
                return meant
            case _:
                return [None for _ in dims]

    def _told(self, dim: Dimension) -> int | None:
        if isinstance(dim, int):
            return dim
        named = self.sizes.named(dim)
        return self._found.get(dim) if named is None else named

    def _bind(self, dim: Dimension, size: int) -> None:
        if isinstance(dim, str) and dim:
            self._found.setdefault(dim, size)

    def _asked(self) -> str:
        return f"batch {self.sizes.batch}, sequence {self.sizes.new} and past {self.sizes.past}"

    def _error(self, tensor: Tensor, message: str) -> OnnxBlocksError:
        return OnnxBlocksError(message, file=self.file, tensor=tensor.name)


def _positions(dims: Sequence[Dimension]) -> int:
    """Which dimension of a cache is that of positions: the one that is called so, else the only one that is open."""
    inner = range(1, len(dims))
    probe = StepSizes(batch=0, new=1, past=2)
    called = [axis for axis in inner if isinstance(dim := dims[axis], str) and probe.named(dim)]
    opened = [axis for axis in inner if isinstance(dims[axis], str)]
    for found in (called, opened):
        if len(found) == 1:
            return found[0]
    return _POSITIONS


def by_place(rank: int, sizes: StepSizes) -> list[int | None]:
    """How long the sides of a tensor of that rank are where nothing else tells."""
    new, total = sizes.new, sizes.total
    places: dict[int, list[int | None]] = {
        1: [new],
        2: [sizes.batch, new],
        3: [sizes.batch, new, None],
        4: [sizes.batch, 1, new, total],
    }
    return places.get(rank, [None] * rank)

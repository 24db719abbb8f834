"""What a file of a block declares: its inputs and outputs, each with a name, a dtype and dimensions."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from blockrelay.errors import OnnxBlocksError

#: Of one block. A layer has fewer than ten; a graph with all layers of a large model has some hundreds.
MAX_TENSORS = 1024
#: Each side of 0 is as long as the graph declares it; a name, or "" where the graph says nothing.
Dimension = int | str
_NUMBERED = re.compile(r"(.*?)(\d+)\.onnx", re.ASCII)
#: A name is shown to people in one line.
_MAX_NAME = 500


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or an output. `dtype` as numpy spells it (float16); `dims` is None where the graph does not even say how
    many there are."""

    name: str
    dtype: str
    dims: tuple[Dimension, ...] | None

    @property
    def rank(self) -> int | None:
        return None if self.dims is None else len(self.dims)


@dataclass(frozen=True, slots=True)
class Signature:
    """Of the file of block `index` (1 is the first), by the graph's own order. Names of inputs are unique, and so are
    those of outputs (`check_names`)."""

    index: int
    file: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @property
    def block(self) -> str:
        """As people and plans name it: block_1."""
        return f"block_{self.index}"


def check_names(file: str, kind: str, names: Collection[str]) -> None:
    """Raises OnnxBlocksError for more names than a block has, for one that comes twice, and for one that cannot be
    shown. `kind` is inputs or outputs."""
    if len(names) > MAX_TENSORS:
        raise OnnxBlocksError(f"{len(names):,} {kind}; a block has at most {MAX_TENSORS:,}", file=file)
    seen: set[str] = set()
    for name in names:
        if not name or len(name) > _MAX_NAME or not name.isprintable():
            raise OnnxBlocksError(f"the name of one of the {kind} is empty, too long or not printable", file=file)
        if name in seen:
            raise OnnxBlocksError(f"comes twice among the {kind}", file=file, tensor=name)
        seen.add(name)


def shown(dims: Sequence[Dimension] | None) -> str:
    """Dimensions as people read them: (batch_size, 1, 10, ?)."""
    if dims is None:
        return "of unknown dimensions"
    return f"({', '.join(str(one) if one != '' else '?' for one in dims)}{',' if len(dims) == 1 else ''})"


def in_order(names: Collection[str]) -> list[str]:
    """Names of files as block_1.onnx, block_2.onnx and so on, by number.

    They may be called anything that ends in a number, all alike, and the numbers are 1 to the last without a gap.
    Raises OnnxBlocksError that names the file that is missing or not like the others.
    """
    numbered: dict[int, str] = {}
    prefixes: dict[str, str] = {}
    for name in sorted(names):
        found = _NUMBERED.fullmatch(name)
        if found is None:
            raise OnnxBlocksError("has no number; blocks are files such as block_1.onnx, block_2.onnx", file=name)
        number = int(found[2]) if len(found[2]) < 10 else 0
        if number in numbered:
            raise OnnxBlocksError(f"has the number of {numbered[number]}", file=name)
        numbered[number] = name
        prefixes.setdefault(found[1], name)
    if len(prefixes) > 1:
        one, other = sorted(prefixes.values())[:2]
        raise OnnxBlocksError(f"is not called like {one}; blocks of two models need two folders", file=other)
    if 0 in numbered:
        raise OnnxBlocksError("has no number of a block; the first one is 1", file=numbered[0])
    (prefix,) = prefixes or ("block_",)
    for index in range(1, max(len(numbered), 1) + 1):
        if index not in numbered:
            raise OnnxBlocksError(f"{_expected(prefix, index, numbered)} is missing")
    return [numbered[index] for index in range(1, len(numbered) + 1)]


def _expected(prefix: str, index: int, numbered: Mapping[int, str]) -> str:
    """How the missing file would be called, with as many digits as its neighbours."""
    digits = [found[2] for name in numbered.values() if (found := _NUMBERED.fullmatch(name)) is not None]
    width = max((len(one) for one in digits if one.startswith("0")), default=1)
    return f"{prefix}{index:0{width}}.onnx"

"""The inputs and outputs that a block's ONNX file declares: names, dtypes and dimensions."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from blockrelay.errors import OnnxBlocksError

#: Most inputs, or outputs, of a block. One layer has fewer than ten; a graph with all layers of a large model hundreds.
MAX_TENSORS = 1024
#: One dimension as the graph declares it: a number (0 or more), a name, or "" if the graph does not declare it.
Dimension = int | str
_NUMBERED = re.compile(r"(.*?)(\d+)\.onnx", re.ASCII)
#: Most characters of a tensor's name, since messages show it in one line.
_MAX_NAME = 500


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or an output of a block, as its file declares it."""

    name: str
    dtype: str
    """In numpy's spelling: float16."""
    dims: tuple[Dimension, ...] | None
    """None if the graph does not even declare the number of dimensions."""

    @property
    def rank(self) -> int | None:
        """Number of dimensions; None if the graph does not declare it."""
        return None if self.dims is None else len(self.dims)


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of one block's file, in the graph's order.

    Names of inputs are unique, and so are those of outputs (`check_names`).
    """

    index: int
    """The block's number; the first is 1."""
    file: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @property
    def block(self) -> str:
        """The block's name in plans and messages: block_1."""
        return f"block_{self.index}"

    def error(self, message: str, tensor: str | None = None) -> OnnxBlocksError:
        """Returns the error that names this block's file, and the input or output `tensor` if it is about one."""
        return OnnxBlocksError(message, file=self.file, tensor=tensor)


def check_names(file: str, kind: str, names: Collection[str]) -> None:
    """Checks the names of all inputs, or all outputs, of a block. `kind` is "inputs" or "outputs", for messages.

    Raises OnnxBlocksError if there are more than MAX_TENSORS, if one comes twice, or if one cannot be shown in a line.
    """
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
    """Returns dimensions as messages show them: (batch_size, 1, 10, ?); None: `of unknown dimensions`."""
    if dims is None:
        return "of unknown dimensions"
    return f"({', '.join(str(one) if one != '' else '?' for one in dims)}{',' if len(dims) == 1 else ''})"


def in_order(names: Collection[str]) -> list[str]:
    """Sorts the names of blocks' files by number: block_1.onnx, block_2.onnx and so on.

    Any names of the form <text><number>.onnx will do, if <text> is the same in all and the numbers are 1 to the last
    without a gap. Raises OnnxBlocksError that names the file that is missing or not like the others, also for no names.
    """
    numbered: dict[int, str] = {}
    prefixes: dict[str, str] = {}
    for name in sorted(names):
        match = _NUMBERED.fullmatch(name)
        if match is None:
            raise OnnxBlocksError("has no number; blocks are files such as block_1.onnx, block_2.onnx", file=name)
        number = int(match[2]) if len(match[2]) < 10 else 0
        if number in numbered:
            raise OnnxBlocksError(f"has the number of {numbered[number]}", file=name)
        numbered[number] = name
        prefixes.setdefault(match[1], name)
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
    """Returns the name of a missing file, padded with zeros like its neighbours."""
    digits = [match[2] for name in numbered.values() if (match := _NUMBERED.fullmatch(name)) is not None]
    width = max((len(number) for number in digits if number.startswith("0")), default=1)
    return f"{prefix}{index:0{width}}.onnx"

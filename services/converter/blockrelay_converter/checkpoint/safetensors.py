"""Reads the tensors of a Hugging Face checkpoint: safetensors, one file or sharded by an index.

Files are memory-mapped and never loaded whole: a tensor is read a few rows at a time, and `forget` returns its memory
to the system, so memory stays small for any model size.
The safetensors format: u64 header length, JSON header {name: {dtype, shape, data_offsets}}, then the data.
"""

import math
import mmap
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.lfs_pointer import refuse_lfs_pointer
from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import UnsupportedModel, UsageError
from blockrelay_converter.checkpoint.other_folders import refuse_other_weights

_STORAGE = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_REMEDIES = {
    "lm_head.weight": ': where the head is the embedding, config.json must say "tie_word_embeddings": true',
}
_WHOLE = re.compile(r"[IU][0-9]+|BOOL")
_MAX_HEADER_BYTES = 100 << 20
_SHARD = re.compile(r"model-[0-9]+-of-[0-9]{1,9}\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsTensor:
    """A tensor of floats in a mapped safetensors file. Implements `weight_source.SourceTensor`."""

    name: str
    bfloat16: bool
    raw: NDArray[Any]
    """The mapped values; bfloat16 as uint16, the upper half of a float32."""
    mapping: mmap.mmap
    """The mapped file that `raw` is a view of."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.raw.shape

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Returns a float32 copy of rows `start` to `stop - 1` of the first axis.

        Raises UsageError if a value is not finite.
        """
        part = self.raw[start:stop]
        if self.bfloat16:
            values = (part.astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            values = part.astype(np.float32)
        if not np.isfinite(values).all():
            raise UsageError(f"tensor {self.name} holds values that are not finite: the checkpoint is damaged")
        return values

    def groups(self, start: int, stop: int) -> None:
        """Returns None: a checkpoint has floats, not w4a8 groups."""

    def forget(self) -> None:
        """Releases the file's pages from this process's memory; the tensor may be read again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor as the header of its file describes it; the description is checked when the tensor is opened."""

    file: str
    dtype: str
    header: Fields
    """The tensor's entry of the header, without its dtype."""
    data: NDArray[np.uint8]
    mapping: mmap.mmap

    def opened(self, name: str) -> SafetensorsTensor:
        """Checks the description and returns the tensor. Raises UnsupportedModel or UsageError that names it."""
        dtype = self.dtype
        shape, offsets = self.header.integers("shape"), self.header.integers("data_offsets")
        if dtype not in _STORAGE:
            raise UnsupportedModel(
                f"tensor {name} is stored as {dtype}; only F32, F16 and BF16 weights can be converted", field=name
            )
        kind, size = np.dtype(_STORAGE[dtype]), self.data.size
        if len(offsets) != 2 or offsets[1] > size or offsets[1] - offsets[0] != math.prod(shape) * kind.itemsize:
            raise UsageError(f"tensor {name} lies outside {self.file}, which is cut short or damaged")
        raw = self.data[offsets[0] : offsets[1]].view(kind).reshape(shape)
        return SafetensorsTensor(name=name, bfloat16=dtype == "BF16", raw=raw, mapping=self.mapping)


class Checkpoint:
    """The tensors of a checkpoint folder by name. Making one reads only the headers of the files."""

    def __init__(self, folder: Path) -> None:
        """Reads the headers. Raises UsageError if there are no safetensors, or if files are missing or damaged."""
        self._stored: dict[str, _Stored] = {}
        self._opened: dict[str, SafetensorsTensor] = {}
        for path, names in _files(folder):
            tensors = _read_file(path)
            for name in names if names is not None else tensors:
                if name not in tensors:
                    raise UsageError(f"tensor {name} is not in {path.name}, where the index says it is")
                self._stored[name] = tensors[name]

    def names(self) -> frozenset[str]:
        """Returns the names of all tensors that may be weights; tensors of integers are counters and are left out."""
        return frozenset(name for name, stored in self._stored.items() if not _WHOLE.fullmatch(stored.dtype))

    def tensor(self, name: str, shape: tuple[int, ...]) -> SafetensorsTensor:
        """Returns the tensor `name`, whose shape must be `shape`.

        Raises UsageError if it is missing, damaged or of another shape, and UnsupportedModel for a dtype other than
        F32, F16 and BF16.
        """
        if name not in self._stored:
            raise UsageError(f"tensor {name} is missing from the checkpoint{_REMEDIES.get(name, '')}")
        if name not in self._opened:
            self._opened[name] = self._stored[name].opened(name)
        stored = self._opened[name]
        if stored.shape != shape:
            raise UsageError(f"tensor {name} has shape {list(stored.shape)}, but config.json asks for {list(shape)}")
        return stored


def _files(folder: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """Yields the safetensors files, each with the tensors to take from it (None: all)."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        refuse_lfs_pointer(index)
        where = Fields.parse(index.read_bytes(), index.name, UsageError).nested("weight_map")
        by_file: dict[str, list[str]] = {}
        for name in where.names():
            by_file.setdefault(where.text(name), []).append(name)
        for file, names in sorted(by_file.items()):
            if not file or Path(file).name != file or "\\" in file:
                raise UsageError(f"{index.name}: {file!r} is not a plain file name")
            if not (folder / file).is_file():
                raise UsageError(f"{file} is missing: {index.name} names it for tensor {names[0]}")
            yield folder / file, names
    elif single.is_file():
        yield single, None
    elif shards := sorted(path for path in folder.glob("model-*.safetensors") if _SHARD.fullmatch(path.name)):
        for name in _all_shards(shards):
            if not (folder / name).is_file():
                raise UsageError(f"{name} is missing: {shards[0].name} is there, and no {index.name}")
            yield folder / name, None
    else:
        refuse_other_weights(folder)


def _all_shards(shards: Sequence[Path]) -> list[str]:
    """Returns the names of all shards; the names of the present ones tell how many there must be."""
    count = shards[0].name.removesuffix(".safetensors").rpartition("-of-")[2]
    return [f"model-{number:0{len(count)}}-of-{count}.safetensors" for number in range(1, int(count) + 1)]


def _read_file(path: Path) -> dict[str, _Stored]:
    refuse_lfs_pointer(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise UsageError(f"{path.name} is not a safetensors file, or is cut short")
        header = Fields.parse(file.read(length), path.name, UsageError)
        if size == 8 + length:
            return {}
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    data = np.frombuffer(mapping, np.uint8, offset=8 + length)
    tensors: dict[str, _Stored] = {}
    for name in header.names():
        if name != "__metadata__":
            entry = header.nested(name)
            tensors[name] = _Stored(path.name, entry.text("dtype"), entry, data, mapping)
    return tensors

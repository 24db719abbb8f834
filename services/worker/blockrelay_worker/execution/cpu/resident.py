"""Blocks that this process has loaded and verified for its CPU: executors that need an equal one share it.

Folders with an equal file of a block, such as mixes of precisions of one model, share that block too. Executors hold
their blocks; one that the last of them has closed is freed.
"""

import os
import threading
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from blockrelay.block_folder.manifest import ROTARY_NAME, Manifest
from blockrelay.block_folder.model import FLOATS, block_linears, float_graph, in_groups
from blockrelay_worker.execution.cpu.layers import Block
from blockrelay_worker.kernels.interface import Kernels

#: Held while a stage is loaded: two at once would read, pack and verify the same blocks twice.
LOADING = threading.Lock()
_resident: WeakValueDictionary[Hashable, Block] = WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class Form:
    """The code that serves blocks: those of another form are not shared."""

    kernels: Kernels
    threads: int
    """CPU threads of ONNX Runtime."""
    tiles: bool
    """True if ONNX Runtime may be used beside our kernels, which have AMX tiles (`loading.load_stage`)."""


def find(manifest: Manifest, blocks: Iterable[int], form: Form) -> dict[int, Block]:
    """Returns those of `blocks` that are loaded in this form, by number. Any thread may call it."""
    found = {index: _resident.get(_key(manifest, index, form)) for index in blocks}
    return {index: block for index, block in found.items() if block is not None}


def keep(manifest: Manifest, loaded: Mapping[int, Block], form: Form) -> None:
    """Has later loads find the verified blocks `loaded` for as long as an executor has them. LOADING must be held."""
    for index, block in loaded.items():
        _resident[_key(manifest, index, form)] = block


def _key(manifest: Manifest, index: int, form: Form) -> Hashable:
    """Returns all that decides what a block computes, how, and what was checked when it was loaded."""
    block = manifest.block(index)
    # What does not enter the computation of a block. A field that is new counts until it stands here.
    shape = replace(
        manifest.model, name="", family="", layers=0, max_position=0, eos_ids=(), bos_id=None, bos_token=None,
        eos_token=None, special_tokens=(),
    )  # fmt: skip
    return (
        os.getpid(),  # a forked process has kernel threads of its own
        (form.kernels.isa, form.kernels.threads, form.threads, form.tiles),
        manifest.block_file(index).sha256,
        (manifest.precision_of(index), manifest.basis, block.known_answer, shape),
        tuple(sorted((name, spec.offset, spec.dtype, spec.shape) for name, spec in block.tensors.items())),
        tuple(manifest.files[path].sha256 for path in (ROTARY_NAME, *_graphs(manifest, index))),
    )


def _graphs(manifest: Manifest, index: int) -> list[str]:
    """Returns the files of the graphs by which ONNX Runtime may compute the linear layers of block `index`."""
    precision, linears = manifest.precision_of(index), block_linears(index, manifest.model.blocks)
    if in_groups(precision):
        return []
    if precision in FLOATS:
        return [manifest.graphs[float_graph(kind, manifest.precisions)] for kind in linears]
    return [manifest.graphs[name] for kind in linears for name in (kind, f"{kind}.u8u8")]

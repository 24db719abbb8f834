"""Finds the KV caches (pasts and presents) of a whole model, by exporters' names or else by how tensors depend."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.cache_names import CacheSlot, Half, cache_slot, slot_named
from blockrelay.onnx_blocks.signature import Tensor
from blockrelay_worker.offline.onnx_blocks.splitting.planning.graph import SHAPE, WholeGraph

_RANK = 4
_HALVES: tuple[Half, Half] = ("key", "value")
_NO_HALVES: frozenset[Half] = frozenset()


@dataclass(frozen=True, slots=True)
class Caches:
    """The KV caches of a model, complete: each layer from 0 on has past and present keys and values."""

    pasts: Mapping[str, CacheSlot]
    """Inputs with the keys and values of earlier tokens, by name."""
    presents: Mapping[str, CacheSlot]
    """Outputs: the pasts with the keys and values of this step's tokens, by name."""

    @property
    def layers(self) -> int:
        """Number of layers with a cache."""
        return len(self.pasts) // len(_HALVES)

    def past(self, slot: CacheSlot) -> str:
        """Returns the name of the input with the past of `slot`, which is one of these caches."""
        return next(name for name, other in self.pasts.items() if other == slot)

    def renamed(self) -> Mapping[str, str]:
        """Returns new names, as optimum gives them, for caches that are not recognised as caches by their names.

        Blocks are wired together by these names.
        """
        pasts = {name: slot for name, slot in self.pasts.items() if slot_named(name, "past") is None}
        presents = {name: slot for name, slot in self.presents.items() if slot_named(name, "present") is None}
        return {name: f"past_key_values.{slot.layer}.{slot.half}" for name, slot in pasts.items()} | {
            name: f"present.{slot.layer}.{slot.half}" for name, slot in presents.items()
        }


def find_pasts(graph: WholeGraph) -> Mapping[str, CacheSlot]:
    """Returns the inputs that are pasts, by name.

    Raises OnnxBlocksError if there are none, if two are of the same layer and half, if a name does not tell the layer,
    or if a layer between 0 and the last one lacks keys or values. Also raises it for an input that has the
    name of a past and not four dimensions.
    """
    named = {tensor.name: cache_slot(tensor, "past", file=graph.file) for tensor in graph.inputs}
    pasts = {name: slot for name, slot in named.items() if slot is not None} or _by_number(graph)
    if not pasts:
        raise OnnxBlocksError(
            "has no pasts: inputs with four dimensions that are called past_key_values.0.key or alike", file=graph.file
        )
    _check_complete(graph, pasts)
    return pasts


def _by_number(graph: WholeGraph) -> dict[str, CacheSlot]:
    """Returns the inputs with four dimensions, for models in which no name is that of a cache.

    The first number in a name is the layer, and keys come before values: `past_0_0` and `past_0_1` are the keys and
    values of layer 0.
    """
    by_layer: dict[int, list[str]] = {}
    for tensor in graph.inputs:
        if tensor.rank == _RANK:
            number = re.search(r"\d{1,6}", tensor.name, re.ASCII)
            if number is None:
                raise OnnxBlocksError("has no number of a layer in its name", file=graph.file, tensor=tensor.name)
            by_layer.setdefault(int(number[0]), []).append(tensor.name)
    slots: dict[str, CacheSlot] = {}
    for layer, names in by_layer.items():
        if len(names) != len(_HALVES):
            raise OnnxBlocksError(f"is one of {len(names)} pasts of layer {layer}", file=graph.file, tensor=names[-1])
        slots |= {name: CacheSlot(layer, half) for name, half in zip(names, _HALVES, strict=True)}
    return slots


def _check_complete(graph: WholeGraph, pasts: Mapping[str, CacheSlot]) -> None:
    by_slot: dict[CacheSlot, str] = {}
    for name, slot in pasts.items():
        if slot in by_slot:
            raise OnnxBlocksError(f"is {slot} so far, and so is {by_slot[slot]}", file=graph.file, tensor=name)
        by_slot[slot] = name
    last, name = max((slot.layer, name) for name, slot in pasts.items())
    for layer in range(min(last + 1, len(pasts) + 1)):
        for half in _HALVES:
            if CacheSlot(layer, half) not in by_slot:
                missing = CacheSlot(layer, half)
                raise OnnxBlocksError(f"is of layer {last}, and no input is {missing}", file=graph.file, tensor=name)


@dataclass(frozen=True, slots=True)
class Dependence:
    """The inputs that each tensor depends on. A tensor that has only another one's length does not depend on it."""

    layer: Mapping[str, int]
    """The highest layer on whose past the tensor depends; tensors that depend on no past are absent."""
    halves: Mapping[str, frozenset[Half]]
    """Which halves (keys, values) of that layer's past the tensor depends on."""
    hidden: frozenset[str]
    """The tensors that depend on tokens or on a past."""
    live: frozenset[str]
    """The tensors that change with any input, be it only in length."""


def dependence(graph: WholeGraph, pasts: Mapping[str, CacheSlot], tokens: str) -> Dependence:
    """Returns the dependence of all tensors of `graph`. `tokens` is the name of the input that is embedded.

    `pasts` are the inputs that are pasts, by name (see `find_pasts`).
    """
    layer = {name: slot.layer for name, slot in pasts.items()}
    halves: dict[str, frozenset[Half]] = {name: frozenset({slot.half}) for name, slot in pasts.items()}
    hidden = {tokens, *pasts}
    live = {tensor.name for tensor in graph.inputs}
    for node in graph.nodes:
        if any(name in live for name in node.inputs):
            live.update(node.outputs)
        if node.kind == SHAPE:
            continue
        if any(name in hidden for name in node.inputs):
            hidden.update(node.outputs)
        highest = max((layer.get(name, -1) for name in node.inputs), default=-1)
        if highest >= 0:
            of = _NO_HALVES.union(*(halves[name] for name in node.inputs if layer.get(name) == highest))
            for name in node.outputs:
                layer[name], halves[name] = highest, of
    return Dependence(layer, halves, frozenset(hidden), frozenset(live))


def find_presents(graph: WholeGraph, pasts: Mapping[str, CacheSlot], depends: Dependence) -> Mapping[str, CacheSlot]:
    """Returns the outputs that are presents, by name.

    Raises OnnxBlocksError, with the tensor, for a present without its past, for a past without its present, and for two
    outputs that are the same present. Also raises it for a present that does not depend on its own past, or depends on
    that of a later layer. The same goes for an output that has the name of a present and not four dimensions.
    """
    named = {tensor.name: cache_slot(tensor, "present", file=graph.file) for tensor in graph.outputs}
    presents = {name: slot for name, slot in named.items() if slot is not None}
    if not presents:
        presents = _by_past(
            [tensor for tensor in graph.outputs if tensor.rank == _RANK and tensor.name in depends.layer], depends
        )
    slots = {slot: name for name, slot in pasts.items()}
    seen: dict[CacheSlot, str] = {}
    for name, slot in presents.items():
        if slot in seen:
            raise OnnxBlocksError(f"is {slot}, and so is {seen[slot]}", file=graph.file, tensor=name)
        seen[slot] = name
        if slot not in slots:
            raise OnnxBlocksError(f"is {slot}, and no input is its past", file=graph.file, tensor=name)
        of = depends.layer.get(name, -1)
        if of > slot.layer:
            raise OnnxBlocksError(
                f"is {slot}, and the past of layer {of} is in it: layers do not follow each other",
                file=graph.file,
                tensor=name,
            )
        if of < slot.layer:
            raise OnnxBlocksError(f"is {slot}, and their past is not in it", file=graph.file, tensor=name)
    for slot, name in slots.items():
        if slot not in seen:
            raise OnnxBlocksError(f"is {slot} so far, and no output is its present", file=graph.file, tensor=name)
    return presents


def _by_past(outputs: Sequence[Tensor], depends: Dependence) -> dict[str, CacheSlot]:
    """Returns for each output the past that it depends on. If it depends on both halves, keys come first."""
    presents: dict[str, CacheSlot] = {}
    for tensor in outputs:
        layer, halves = depends.layer[tensor.name], depends.halves[tensor.name]
        slots = [CacheSlot(layer, half) for half in _HALVES if half in halves]
        presents[tensor.name] = next((slot for slot in slots if slot not in presents.values()), slots[0])
    return presents

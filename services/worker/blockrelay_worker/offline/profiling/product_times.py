"""Measures a block's linear layers in each exact precision, with made-up weights of the model's shapes.

With these a planner estimates a block in a precision to which the model was not converted: all other parts of a block
take the same time. The linear layers of several layers run one after the other, then those of the head, as in a step:
as many as the model has, or as are needed to hold no weights in a CPU cache.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from blockrelay.block_folder.model import (
    GROUP,
    PRECISIONS,
    ModelConfig,
    Precision,
    block_linears,
    in_groups,
    is_exact,
    ungroupable,
)
from blockrelay.planning.profile import ProductTimes
from blockrelay_worker.kernels.arguments import F32, U8
from blockrelay_worker.kernels.interface import Kernels, Linear
from blockrelay_worker.offline.profiling.block_times import ROWS
from blockrelay_worker.offline.profiling.samples import ROUNDS, Samples, runs_of_a_round

#: Bytes of weights that are more than any CPU cache holds.
_UNCACHED_BYTES = 256 << 20
#: Made-up scale: small, so that nothing overflows, and not denormal, since CPUs are slow with denormal numbers.
_SCALE = 2.0**-6


@dataclass(frozen=True, slots=True)
class _Linears:
    """The linear layers of one block, each with its input rows, room for its output, and scales of its rows' groups."""

    products: tuple[tuple[Linear, U8, F32, F32 | None], ...]

    def multiply(self, rows: int) -> None:
        for product, given, out, scale in self.products:
            product(given[:rows], out[:rows], None if scale is None else scale[:rows])


def product_times(model: ModelConfig, kernels: Kernels) -> dict[str, ProductTimes]:
    """Measures the linear layers in each exact precision that `model` and `kernels` allow; returns times by precision.

    They are medians in seconds, by the number of rows in a step (`block_times.ROWS`), of one layer and of the head. The
    spread is half the distance between the quartiles of a layer's samples, as a share of the median. Empty if
    `kernels` have no matmul of their own.
    """
    return {p: _measured(model, p, kernels) for p in PRECISIONS if is_exact(p) and _is_possible(model, p, kernels)}


def _is_possible(model: ModelConfig, precision: Precision, kernels: Kernels) -> bool:
    return kernels.has_matmul and ungroupable(model, (precision,) * model.blocks) is None


def _measured(model: ModelConfig, precision: Precision, kernels: Kernels) -> ProductTimes:
    """Measures the linear layers of one precision."""
    layer_kinds, head_kinds = block_linears(1, model.blocks), block_linears(model.blocks, model.blocks)
    size = sum(depth * width for depth, width in map(model.linear_shape, layer_kinds))
    layers = [
        _linears(model, layer_kinds, precision, kernels)
        for _ in range(max(1, min(model.layers, -(-_UNCACHED_BYTES // size))))
    ]
    head = _linears(model, head_kinds, precision, kernels)
    of_a_layer = {rows: Samples() for rows in ROWS}
    of_the_head = {rows: Samples() for rows in ROWS}
    for _ in range(ROUNDS):
        for rows in ROWS:
            step = _step([*layers, head], rows, kernels)
            step()
            for _ in runs_of_a_round():
                *in_layers, in_head = step()
                of_a_layer[rows].seconds.append(sum(in_layers) / len(layers))
                of_the_head[rows].seconds.append(in_head)
    return ProductTimes(
        layer={rows: samples.median for rows, samples in of_a_layer.items()},
        head={rows: samples.median for rows, samples in of_the_head.items()},
        spread={rows: samples.spread for rows, samples in of_a_layer.items()},
    )


def _step(blocks: Sequence[_Linears], rows: int, kernels: Kernels) -> Callable[[], list[float]]:
    """Returns a function that runs `rows` rows through all blocks, as a stage does, and returns the seconds of each."""
    parts = [partial(block.multiply, rows) for block in blocks]
    if kernels.records:
        program = kernels.record(parts)

        def recorded() -> list[float]:
            seconds: list[float] = []
            program.run(seconds)
            return seconds

        return recorded
    return lambda: [_seconds(part) for part in parts]


def _seconds(part: Callable[[], None]) -> float:
    started = time.perf_counter()
    part()
    return time.perf_counter() - started


def _linears(model: ModelConfig, kinds: Sequence[str], precision: Precision, kernels: Kernels) -> _Linears:
    dice, products = np.random.default_rng(1), list[tuple[Linear, U8, F32, F32 | None]]()
    for kind in kinds:
        depth, width = model.linear_shape(kind)
        given = dice.integers(0, 256, (max(ROWS), depth), np.uint8)
        scale = np.full((max(ROWS), depth // GROUP), _SCALE, np.float32) if in_groups(precision) else None
        out = np.empty((max(ROWS), width), np.float32)
        products.append((_product(depth, width, precision, kernels, dice), given, out, scale))
    return _Linears(tuple(products))


def _product(depth: int, width: int, precision: Precision, kernels: Kernels, dice: np.random.Generator) -> Linear:
    if in_groups(precision):
        factors = np.full((depth // GROUP, width), _SCALE, np.float16)
        return kernels.group_matmul(dice.integers(0, 256, (depth // 2, width), np.uint8), factors, -factors)
    scale = np.full(width, _SCALE, np.float32)
    return kernels.matmul(dice.integers(-127, 128, (depth, width), np.int8), scale)

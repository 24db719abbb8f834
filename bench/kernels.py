"""Times the float kernels on a 1.1B Llama shape (hidden 2048, 32/8 heads of 64, MLP 8192): `python bench/kernels.py`.

Prints microseconds per call (median) for every instruction set that this CPU has; asserts nothing. The last columns are
rates: gigabytes of keys and values read per second, and 10^9 float operations per second (2 per fma).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import GROUP
from blockrelay_worker.kernels import PAGE, Kernels, load_kernels, supported_isas

HIDDEN, MLP, QUERY_HEADS, KV_HEADS, HEAD_DIM = 2048, 8192, 32, 8, 64
HADAMARD = 512  # what w8a8 has for this MLP


def median_us(call: Callable[[], object], seconds: float) -> float:
    """Repeats `call` for `seconds`, and at least three times; returns the median microseconds of a call."""
    call()
    spent: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(spent) < 3:
        start = time.perf_counter()
        call()
        spent.append(time.perf_counter() - start)
    return statistics.median(spent) * 1e6


def row_kernels(kernels: Kernels, rows: int, seconds: float) -> dict[str, float]:
    """Returns the median microseconds of each kernel that works row by row, on `rows` rows, in runs of `seconds`."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, HIDDEN), np.float32)
    y = rng.standard_normal((rows, HIDDEN), np.float32)
    weight = np.ones(HIDDEN, np.float32)
    row_scale = np.full(rows, 1e-3, np.float32)
    gate_up = rng.standard_normal((rows, 2 * MLP), np.float32)
    u, scale = np.empty((rows, HIDDEN), np.uint8), np.empty(rows, np.float32)
    scales = np.empty((rows, HIDDEN // GROUP), np.float32)
    u_mlp = np.empty((rows, MLP), np.uint8)
    qkv = rng.standard_normal((rows, (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM), np.float32)
    angle = rng.standard_normal((rows, HEAD_DIM // 2)).astype(np.float32)
    index = np.arange(rows, dtype=np.int32)
    pages: NDArray[np.float16] = np.zeros((rows // PAGE + 1, KV_HEADS, HEAD_DIM, PAGE), np.float16)
    v_pages = pages.reshape(-1, KV_HEADS, PAGE, HEAD_DIM).copy()
    page, slot = index // PAGE, index % PAGE
    q = np.empty((rows, QUERY_HEADS, HEAD_DIM), np.float32)
    return {
        "norm_quantise": median_us(lambda: kernels.norm_quantise(x, weight, 1e-5, u=u, scale=scale), seconds),
        "quantise": median_us(lambda: kernels.quantise(x, u=u, scale=scale), seconds),
        "quantise_groups": median_us(lambda: kernels.quantise(x, group=GROUP, u=u, scale=scales), seconds),
        "add_scaled": median_us(lambda: kernels.add_scaled(x, y, row_scale), seconds),
        "swiglu_quantise": median_us(
            lambda: kernels.swiglu_quantise(gate_up, row_scale, HADAMARD, u=u_mlp, scale=scale), seconds
        ),
        "rotary_append": median_us(
            lambda: kernels.rotary_append(
                qkv, row_scale, None, None, None, 1e-5, angle, angle, index, page, slot, pages, v_pages, out=q
            ),
            seconds,
        ),
    }


def attention_us(
    kernels: Kernels,
    sequences: int,
    rows: int,
    first_position: int,
    dtype: type[np.float16 | np.float32],
    seconds: float,
) -> float:
    """Returns the median microseconds of attention of `sequences` segments with `rows` rows each.

    The rows have the positions from `first_position` on. `dtype` is that of the KV pages. It is run for `seconds`.
    """
    rng = np.random.default_rng(0)
    each = -(-(first_position + rows) // PAGE)
    shape = (sequences * each, KV_HEADS, HEAD_DIM, PAGE)
    k_pages: Any = rng.standard_normal(shape, np.float32).astype(dtype)
    v_pages: Any = rng.standard_normal(shape, np.float32).astype(dtype).reshape(-1, KV_HEADS, PAGE, HEAD_DIM)
    table = rng.permutation(sequences * each).astype(np.int32).reshape(sequences, each)
    segments = np.array([(s * rows, rows, first_position) for s in range(sequences)], np.int64)
    q = rng.standard_normal((sequences * rows, QUERY_HEADS, HEAD_DIM), np.float32)
    out = np.empty((sequences * rows, QUERY_HEADS * HEAD_DIM), np.float32)
    return median_us(lambda: kernels.attention(q, k_pages, v_pages, table, segments, out=out), seconds)


def report(isa: str, threads: int, seconds: float) -> None:
    """Prints the figures of one instruction set on `threads` threads; each kernel runs for `seconds`."""
    kernels = load_kernels(threads, isa=isa)
    print(f"{isa}, {threads} threads")
    for rows in (1, 16, 128):
        figures = "  ".join(f"{name} {us:.0f}" for name, us in row_kernels(kernels, rows, seconds).items())
        print(f"  rows {rows:4d}: {figures}")
    for dtype in (np.float16, np.float32):
        for sequences, rows, first in (
            (1, 1, 100),
            (1, 1, 2048),
            (16, 1, 100),
            (16, 1, 2048),
            (1, 128, 0),
            (1, 256, 2048),
        ):
            us = attention_us(kernels, sequences, rows, first, dtype, seconds)
            keys = sequences * (rows * first + rows * (rows + 1) // 2)
            gigaflops = 4 * keys * QUERY_HEADS * HEAD_DIM / us / 1e3
            read = sequences * (first + rows) * KV_HEADS * HEAD_DIM * 2 * np.dtype(dtype).itemsize / us / 1e3
            print(
                f"  attention {np.dtype(dtype).name} {sequences:2d} x {rows:3d} rows from {first:4d}: {us:7.0f} us"
                f"  {read:6.1f} GB/s  {gigaflops:6.1f} GFLOP/s"
            )


def main() -> None:
    """Prints the figures of the chosen instruction sets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds of each measurement")
    parser.add_argument(
        "--variants", nargs="*", default=list(supported_isas()), help="instruction sets; default: all of this CPU"
    )
    arguments = parser.parse_args()
    for isa in arguments.variants:
        report(isa, arguments.threads, arguments.seconds)


if __name__ == "__main__":
    sys.exit(main())

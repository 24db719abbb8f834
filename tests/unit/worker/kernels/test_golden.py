"""The bits of the kernels, written down: whoever changes them has to raise KERNEL_NUMERICS_VERSION."""

import hashlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay.block_folder.model import GROUP
from blockrelay_worker.execution.cpu.exact_linears import ExactGroupLinear
from blockrelay_worker.kernels import KERNEL_NUMERICS_VERSION, PAGE, Kernels, load_kernels, supported_isas

#: kernel numerics version -> SHA-256 of the results below, first 16 digits
GOLDEN = {4: "4eae7eabeb7a4ee6"}


class _Numbers:
    """Float32 numbers in -2..2 from raw generator words: the same for every version of NumPy."""

    def __init__(self) -> None:
        self._bits = np.random.PCG64(2026)

    def __call__(self, *shape: int) -> NDArray[np.float32]:
        words = self._bits.random_raw(int(np.prod(shape))).astype(np.uint32).view(np.int32)
        return (words.astype(np.float32) * np.float32(2.0**-30)).reshape(shape)


def _digest(kernels: Kernels) -> str:
    numbers = _Numbers()
    rows, hidden, heads, kv_heads, dim = 21, 72, 6, 2, 24
    x, y, gate_up, scale = numbers(rows, hidden), numbers(rows, hidden), numbers(rows, 2 * hidden), numbers(rows)
    results: list[NDArray[np.generic]] = [
        *kernels.norm_quantise(x, numbers(hidden), 1e-5),
        kernels.norm(x, numbers(hidden), 1e-6),
        *kernels.quantise(x * np.float32(100)),
        *kernels.swiglu_quantise(gate_up * np.float32(8), scale, 0),
        *kernels.swiglu_quantise(numbers(rows, 192) * np.float32(8), scale, 32),
        kernels.swiglu(gate_up * np.float32(30)),
        *kernels.norm_quantise(numbers(rows, 96), numbers(96), 1e-5, group=GROUP),
        *kernels.swiglu_quantise(numbers(rows, 192) * np.float32(8), None, 0, group=GROUP),
        _group_product(kernels, numbers),
    ]
    kernels.add_scaled(y, x, scale)
    results.append(y)
    for dtype in (np.float16, np.float32):
        k_pages: Any = numbers(3, kv_heads, dim, PAGE).astype(dtype)
        v_pages: Any = numbers(3, kv_heads, PAGE, dim).astype(dtype)
        table = np.array([[2, 0], [1, -1]], np.int32)
        segments = np.array([(0, 17, 9), (17, 4, 5)], np.int64)
        positions = np.concatenate([np.arange(9, 26), np.arange(5, 9)]).astype(np.int32)
        page = np.concatenate([np.where(positions[:17] < PAGE, 2, 0), np.ones(4)]).astype(np.int32)
        q = kernels.rotary_append(
            numbers(rows, (heads + 2 * kv_heads) * dim) * np.float32(3), scale, numbers((heads + 2 * kv_heads) * dim),
            numbers(dim), numbers(dim), 1e-6, numbers(32, dim // 2), numbers(32, dim // 2), positions, page,
            positions % PAGE, k_pages, v_pages,
        )  # fmt: skip
        results += [q, k_pages, v_pages, kernels.attention(q, k_pages, v_pages, table, segments)]
    pages = numbers(40, kv_heads, dim, PAGE)
    results.append(
        kernels.attention(
            numbers(rows, heads, dim), pages, pages.reshape(40, kv_heads, PAGE, dim).copy(),
            np.arange(40, dtype=np.int32)[None], np.array([(0, rows, 40 * PAGE - rows)], np.int64),
        )
    )  # fmt: skip
    return hashlib.sha256(b"".join(result.tobytes() for result in results)).hexdigest()[:16]


def _group_product(kernels: Kernels, numbers: _Numbers) -> NDArray[np.float32]:
    """The product of rows in groups with 4-bit weights, by the definition where the kernels have none."""
    u, scale = kernels.quantise(numbers(9, 96) * np.float32(100), group=GROUP)
    q4, (gs, gm) = numbers(48, 37).view(np.uint8)[:, ::4].copy(), numbers(2, 3, 37).astype(np.float16)
    product = (kernels.group_matmul if kernels.has_matmul else ExactGroupLinear)(q4, gs, gm)
    out = np.empty((9, 37), np.float32)
    product(u, out, scale)
    return out


@pytest.mark.parametrize("variant", ["reference", *supported_isas()])
def test_the_bits_are_those_of_this_numerics_version(variant: str) -> None:
    assert _digest(load_kernels(2, isa=variant)) == GOLDEN[KERNEL_NUMERICS_VERSION]

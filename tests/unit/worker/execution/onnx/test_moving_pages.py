"""Pages leave a device, and come back, with the very bits that its pools have."""

import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay_worker.execution.onnx.graphs.flavours import FloatType
from blockrelay_worker.execution.onnx.graphs.pages import export_graph, import_graph
from blockrelay_worker.execution.onnx.providers.opening import open_provider
from tests.support.worker.onnx_devices import DEVICES

LAYERS, PAGES = (2, 3), 7
NAMES = [f"block_{block}/{half}" for block in LAYERS for half in ("keys", "values")]


def as_on_a_cpu(pool: NDArray[np.floating], half: str) -> NDArray[np.floating]:
    """Pages [16, kv_heads, head_dim] of a pool: keys [kv_heads, head_dim, 16] or values [kv_heads, 16, head_dim]."""
    return pool.transpose(0, 2, 3, 1) if half == "keys" else pool.transpose(0, 2, 1, 3)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_they_are_bit_equal_both_ways(fp32: BlockFolder, device: str, dtype: FloatType) -> None:
    # Given pools of two layers whose every number is another one, and others
    model, random = fp32.model, np.random.default_rng(5)
    shape = (PAGES, 16, model.kv_heads, model.head_dim)
    full = {name: random.normal(size=shape).astype(dtype) for name in NAMES}
    other = {name: random.normal(size=shape).astype(dtype) for name in NAMES}
    provider = open_provider(device)
    session = provider.session(export_graph(model, LAYERS, dtype))
    # When three pages leave
    binding = session.io_binding()
    for name in NAMES:
        binding.bind_ortvalue_input(name, provider.upload(session, full[name]))
        binding.bind_output(f"{name}_page", "cpu")
    binding.bind_cpu_input("pages", np.array([5, 0, 2], np.int64))
    session.run_with_iobinding(binding)
    left = dict(zip(NAMES, (value.numpy() for value in binding.get_outputs()), strict=True))
    # Then they are what the pools have
    for name, pages in left.items():
        expected = as_on_a_cpu(full[name][[5, 0, 2]], name.rpartition("/")[2])
        assert pages.shape == expected.shape and pages.tobytes() == expected.tobytes()
    # When they come to other places elsewhere, then those places have them, and nothing else has changed
    session = provider.session(import_graph(model, LAYERS, dtype))
    binding, pools = session.io_binding(), {name: provider.upload(session, other[name]) for name in NAMES}
    for name in NAMES:
        binding.bind_cpu_input(f"{name}_page", left[name])
        binding.bind_ortvalue_input(name, pools[name])
        binding.bind_ortvalue_output(f"{name}_out", pools[name])
    binding.bind_cpu_input("pages", np.array([[1], [6], [3]], np.int64))
    session.run_with_iobinding(binding)
    for name in NAMES:
        other[name][[1, 6, 3]] = full[name][[5, 0, 2]]
        assert pools[name].numpy().tobytes() == other[name].tobytes()

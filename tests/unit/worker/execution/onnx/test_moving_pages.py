"""Pages leave a device, and come back, with the very bits that its pools have."""

import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.onnx.bound.session import BoundSession
from blockrelay_worker.execution.onnx.graphs.flavours import PLAIN, FloatType
from blockrelay_worker.execution.onnx.graphs.pages import export_graph, import_graph
from blockrelay_worker.execution.onnx.providers.opening import open_provider
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider
from blockrelay_worker.execution.onnx.stage import OnnxStage
from tests.support.worker.onnx_devices import DEVICES

LAYERS, PAGES = (2, 3), 7
NAMES = [f"block_{block}/{half}" for block in LAYERS for half in ("keys", "values")]


def as_on_a_cpu(pool: NDArray[np.floating], half: str) -> NDArray[np.floating]:
    """Pages [16, kv_heads, head_dim] of a pool: keys [kv_heads, head_dim, 16] or values [kv_heads, 16, head_dim]."""
    return pool.transpose(0, 2, 3, 1) if half == "keys" else pool.transpose(0, 2, 1, 3)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_they_are_bit_equal_both_ways(fp32: BlockFolder, device: str, dtype: FloatType, joined: bool) -> None:
    # Given pools of two layers whose every number is another one, and others
    model, random = fp32.model, np.random.default_rng(5)
    shape = (PAGES, 16, model.kv_heads, model.head_dim)
    full = {name: random.normal(size=shape).astype(dtype) for name in NAMES}
    other = {name: random.normal(size=shape).astype(dtype) for name in NAMES}
    provider = open_provider(device)
    session = provider.session(export_graph(model, LAYERS, dtype, joined=joined))
    # When three pages leave
    pools = {name: provider.upload(session, full[name]) for name in NAMES}
    found = list(BoundSession(session, pools, {}).run({"pages": np.array([5, 0, 2], np.int64)}, None).values())
    # Then they are what the pools have
    left: dict[str, NDArray[np.floating]] = {}
    for name, pages in zip(NAMES, np.split(found[0], len(NAMES), axis=1) if joined else found, strict=True):
        expected = as_on_a_cpu(full[name][[5, 0, 2]], name.rpartition("/")[2])
        left[name] = pages.reshape(expected.shape).copy()
        assert left[name].tobytes() == expected.tobytes() and (joined or pages.shape == expected.shape)
    # When they come to other places elsewhere, then those places have them, and nothing else has changed
    session = provider.session(import_graph(model, LAYERS, dtype))
    pools = {name: provider.upload(session, other[name]) for name in NAMES}
    inputs = {"pages": np.array([[1], [6], [3]], np.int64), **{f"{name}_page": left[name] for name in NAMES}}
    BoundSession(session, {}, pools).run(inputs, None)
    for name in NAMES:
        other[name][[1, 6, 3]] = full[name][[5, 0, 2]]
        assert pools[name].numpy().tobytes() == other[name].tobytes()


class Waiting(CpuProvider):
    """A provider whose outputs are waited for."""

    waits_for_outputs = True


def test_pages_that_come_down_in_one_piece_are_the_same(fp32: BlockFolder) -> None:
    stages = [
        OnnxStage(fp32, 1, 3, pages=8, provider=provider, numerics_id="x", flavour=PLAIN)
        for provider in (CpuProvider(), Waiting())
    ]
    for stage in stages:
        tokens = np.arange(3, 40, dtype=np.int32)
        stage.run(Batch(segments=[Segment(rows=37, first_position=0, pages=[4, 1, 6])], tokens=tokens, wanted=()))
    many, one = (stage.export_pages([4, 6, 1]) for stage in stages)
    for page, other in zip(many, one, strict=True):
        for halves, same in zip(page, other, strict=True):
            for half, equal in zip(halves, same, strict=True):
                assert half.shape == equal.shape and half.tobytes() == equal.tobytes()

"""The costs of ONNX blocks made by others, compared with their files and with sums by hand."""

from dataclasses import replace

import pytest

from blockrelay.block_folder.analysis import analyse
from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.block_folder.manifest import FileSpec
from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.blocks_file import read_blocks_file
from blockrelay.onnx_blocks.handed_on import check_borders
from blockrelay.onnx_blocks.served_shape import served_wiring
from blockrelay.onnx_blocks.wiring import Wiring, wire
from blockrelay.planning.costs import border_bytes, costs_of, onnx_costs
from blockrelay.planning.cuts import check_stages
from blockrelay.protocol.plan import uniform_split
from blockrelay.settings import BUNDLED_MODEL
from tests.support.models.onnx_blocks_served import opened
from tests.support.models.reference_blocks import MASK, ReferenceModel, write_reference_blocks

MODEL = ReferenceModel(layers=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
    root = tmp_path_factory.mktemp("costs")
    return opened(write_reference_blocks(root / "blocks", MODEL), root / "cache")


@pytest.fixture(scope="module")
def wiring(folder: BlockFolder) -> Wiring:
    return served_wiring(folder.root)


def test_bytes_and_kv_are_those_of_each_block(folder: BlockFolder) -> None:
    found = costs_of(folder)
    assert [block.name for block in found.blocks] == [f"block_{n}" for n in range(1, 6)]
    assert folder.onnx_root is not None
    for block in found.blocks:
        size = (folder.onnx_root / f"{block.name}.onnx").stat().st_size
        assert (block.bytes, block.cpu_bytes) == ({"fp16": size}, 2 * size), "float32 where CPUs compute"
        layers = int(block.index <= MODEL.layers)
        assert block.kv_values_per_token == layers * 2 * MODEL.kv_heads * MODEL.head_dim


def test_weights_beside_a_graph_count_and_those_that_blocks_share_count_once(folder: BlockFolder) -> None:
    blocks = read_blocks_file(folder.root / "blocks.json")
    own = {"block_1.data": FileSpec(sha256="x", bytes=1000)}
    shared = {"model.data": FileSpec(sha256="x", bytes=4000)}
    split = [replace(block, files={**block.files, **shared}) for block in blocks[:4]]
    split[0] = replace(split[0], files={**split[0].files, **own})
    before, found = costs_of(folder).blocks, onnx_costs(folder, [*split, blocks[4]]).blocks
    more = [one.bytes["fp16"] - other.bytes["fp16"] for one, other in zip(found, before, strict=True)]
    assert more == [2000, 1000, 1000, 1000, 0]


def test_the_mask_grows_with_what_a_row_attends_to(wiring: Wiring) -> None:
    width = MODEL.hidden + 2 * MODEL.head_dim
    assert [border_bytes(wiring, last) for last in (1, 3)] == [(2 * width, 2)] * 2
    assert border_bytes(wiring, 4) == (2 * MODEL.hidden, 0), "the head takes the hidden rows alone"
    assert border_bytes(wiring, 5) == (0, 0)


def test_a_border_that_nothing_can_cross_has_no_bytes_and_is_refused(folder: BlockFolder, wiring: Wiring) -> None:
    first, *others = wiring.blocks
    outputs = tuple(replace(one, dims=None) if one.name == MASK else one for one in first.outputs)
    later = [
        replace(block, inputs=tuple(replace(one, dims=None) if one.name == MASK else one for one in block.inputs))
        for block in others
    ]
    dynamic = wire([replace(first, outputs=outputs), *later])
    assert [border_bytes(dynamic, last) for last in (1, 4)] == [(0, 0), (2 * MODEL.hidden, 0)]
    with pytest.raises(OnnxBlocksError, match=rf"^block_1.onnx: {MASK}: is of unknown dimensions"):
        check_borders(dynamic, uniform_split(5, 2), 128)
    check_stages(folder, uniform_split(5, 5))


def test_a_block_folder_is_analysed_by_its_shape() -> None:
    ours = open_block_folder(BUNDLED_MODEL, blocks=[])
    assert costs_of(ours) == analyse(ours.model)

"""What a model costs follows from its shape: against sums by hand, published sizes, and the files of a real folder."""

from dataclasses import replace

import pytest

from blockrelay.block_folder.analysis import analyse
from blockrelay.block_folder.folder import open_block_folder
from blockrelay.block_folder.model import ModelConfig
from blockrelay.settings import BUNDLED_MODEL

LLAMA_8B = ModelConfig(
    name="Llama-3.1-8B", family="llama", hidden_size=4096, layers=32, heads=32, kv_heads=8, head_dim=128,
    intermediate_size=14336, vocab_size=128256, max_position=131072, rms_norm_eps=1e-5, qkv_bias=False, qk_norm=False,
)  # fmt: skip


def test_a_model_of_33_blocks() -> None:
    found = analyse(LLAMA_8B)
    assert [block.name for block in found.blocks] == [f"block_{n}" for n in range(1, 34)]
    totals = found.totals()
    assert totals["parameters"] == 8_030_261_248, "as its card says"
    assert totals["kv_bytes_per_token"] == {"w8a8": 131_072, "w4a8": 131_072, "fp32": 262_144, "fp16": 131_072}
    assert totals["hop_bytes_per_row"] == 16_384
    assert found.blocks[-1].kv_values_per_token == found.blocks[-1].hop_bytes_per_row == 0
    assert found.blocks[0].parameters - found.blocks[1].parameters == 128256 * 4096, "block_1 has the embedding"


def test_operations_are_two_for_each_weight_of_a_product() -> None:
    layer, head = analyse(LLAMA_8B).blocks[1], analyse(LLAMA_8B).blocks[-1]
    norms = 2 * 4096
    assert layer.flops_per_row == 2 * (layer.parameters - norms)
    assert head.flops_per_row == 2 * 4096 * 128256
    assert (layer.attention_flops, head.attention_flops) == (4 * 32 * 128, 0)


def test_bytes_are_those_of_the_files() -> None:
    folder = open_block_folder(BUNDLED_MODEL, blocks=[])
    precision = folder.manifest.precision_of(1)
    for block in analyse(folder.model).blocks:
        assert block.bytes[precision] == folder.manifest.files[f"blocks/{block.name}.bin"].bytes


def test_a_step_reads_everything_but_the_embedding() -> None:
    first, second, *_ = analyse(LLAMA_8B).blocks
    assert first.bytes["w8a8"] - first.step_bytes["w8a8"] == 2 * LLAMA_8B.vocab_size * LLAMA_8B.hidden_size
    assert first.step_bytes == second.step_bytes == second.bytes


def test_a_precision_that_the_widths_forbid_is_left_out() -> None:
    odd = replace(LLAMA_8B, intermediate_size=14338)
    assert analyse(odd).precisions == ("w8a8", "fp32", "fp16")
    assert analyse(LLAMA_8B).precisions == ("w8a8", "w4a8", "fp32", "fp16")


@pytest.mark.parametrize("precision", ["w8a8", "w4a8", "fp32", "fp16"])
def test_json_has_every_block_and_the_sums(precision: str) -> None:
    content = analyse(LLAMA_8B).to_json()
    assert (
        sum(block["bytes"][precision] for block in content["blocks"].values()) == content["totals"]["bytes"][precision]
    )

"""Pasts and presents are known by the names that exporters give them."""

import pytest

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.cache_names import CacheSlot, Half, cache_slot
from blockrelay.onnx_blocks.signature import Tensor

DIMS = ("batch_size", 8, "past_sequence_length", 128)


@pytest.mark.parametrize("half", ["key", "value"])
@pytest.mark.parametrize(
    "name",
    [
        "past_key_values.7.{}",
        "past_key_values_{}_7",
        "past_key_values_7_{}",
        "past_key_values.{}_cache_7",
        "past_{}_7",
        "past.7.{}",
    ],
)
def test_every_spelling_of_exporters(name: str, half: Half) -> None:
    slot = CacheSlot(7, half)
    past = name.format(half)
    assert cache_slot(Tensor(past, "float16", DIMS), "past", file="f") == slot
    assert cache_slot(Tensor(past, "float16", DIMS), "present", file="f") is None
    for present in (past.replace("past", "present"), past.replace("past_key_values", "present")):
        assert cache_slot(Tensor(present, "float16", DIMS), "present", file="f") == (
            slot if "past" not in present else None
        )


@pytest.mark.parametrize(
    "name",
    [
        "/model/layers.7/Add_1_output_0",
        "past_key_values",
        "past_key_values.7",
        "past_key_values.7.encoder.key",
        "past_key_values.7.key.1",
        "mypast_key_values.7.key",
        "past_key_values.seven.key",
    ],
)
def test_other_names_are_no_caches(name: str) -> None:
    assert cache_slot(Tensor(name, "float16", DIMS), "past", file="f") is None


def test_a_cache_has_four_dimensions() -> None:
    assert cache_slot(Tensor("past_key_values.0.key", "float16", None), "past", file="f") == CacheSlot(0, "key")
    with pytest.raises(
        OnnxBlocksError, match=r"block_1\.onnx: past_key_values\.0\.key: is called like a cache and has 3"
    ):
        cache_slot(Tensor("past_key_values.0.key", "float16", DIMS[:3]), "past", file="block_1.onnx")

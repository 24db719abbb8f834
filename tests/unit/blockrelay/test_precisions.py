"""The precisions of blocks: the texts that people write are parsed, and each tuple has one text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockrelay.block_folder.model import PRECISIONS, Precision, graph_kinds
from blockrelay.block_folder.precisions import all_exact, format_precisions, kv_item_bytes, parse_precisions
from blockrelay.errors import UsageError


def test_one_name_is_for_every_block_and_the_others_for_those_that_they_name() -> None:
    assert parse_precisions("w4a8", 3) == ("w4a8", "w4a8", "w4a8")
    assert parse_precisions("w8a8, block_4=fp32, block_1-2=w4a8", 4) == ("w4a8", "w4a8", "w8a8", "fp32")


def test_the_text_begins_with_what_most_blocks_have() -> None:
    assert format_precisions(("w8a8", "w8a8")) == "w8a8"
    assert format_precisions(("w4a8", "w8a8", "w8a8", "fp32")) == "w8a8,block_1=w4a8,block_4=fp32"
    assert format_precisions(("fp32", "w8a8")) == "w8a8,block_1=fp32"


@given(st.lists(st.sampled_from(PRECISIONS), min_size=1, max_size=40).map(tuple))
def test_the_text_reads_back(precisions: tuple[Precision, ...]) -> None:
    text = format_precisions(precisions)
    assert parse_precisions(text, len(precisions)) == precisions


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "precision '': '' is none of w8a8, w4a8, fp32, fp16"),
        ("int8", "precision 'int8': 'int8' is none of w8a8, w4a8, fp32, fp16"),
        ("block_1=w8a8", "precision 'block_1=w8a8': 'block_1=w8a8' is none of w8a8, w4a8, fp32, fp16"),
        ("w8a8,", "precision '': write block_3=w4a8 or block_1-4=w4a8 behind the first one"),
        ("w8a8,w4a8", "precision 'w4a8': write block_3=w4a8 or block_1-4=w4a8 behind the first one"),
        ("w8a8,block_2=w2a8", "precision 'block_2=w2a8': 'w2a8' is none of w8a8, w4a8, fp32, fp16"),
        ("w8a8,block_0=w4a8", "precision 'block_0=w4a8': write block_3=w4a8 or block_1-4=w4a8 behind the first one"),
        ("w8a8,block_5=w4a8", "precision 'block_5=w4a8': the model has block_1 to block_4"),
        ("w8a8,block_3-2=w4a8", "precision 'block_3-2=w4a8': the model has block_1 to block_4"),
        ("w8a8,block_1-3=w4a8,block_3=fp32", "precision 'block_3=fp32': block_3 is named twice"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_part(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_precisions(text, 4)
    assert str(caught.value) == message


def test_one_block_that_is_not_exact_makes_the_model_not_exact() -> None:
    assert all_exact(("w8a8", "w4a8"))
    assert not all_exact(("w8a8", "fp32"))
    assert not all_exact(("w8a8", "fp16"))


def test_keys_and_values_have_32_bits_only_where_every_block_computes_in_them() -> None:
    assert kv_item_bytes(("fp32", "fp32")) == 4
    assert kv_item_bytes(("fp32", "w4a8")) == kv_item_bytes(("fp32", "fp16")) == 2


def test_a_folder_has_the_graphs_that_its_blocks_need() -> None:
    layers = ("qkv", "o", "gate_up", "down")
    assert set(graph_kinds(("w4a8", "w4a8"))) == set()
    assert set(graph_kinds(("fp32", "fp32"))) == set(graph_kinds(("fp16", "fp16"))) == {*layers, "head"}
    assert set(graph_kinds(("fp32", "fp16"))) == {f"{layer}.fp32" for layer in (*layers, "head")}
    assert set(graph_kinds(("w4a8", "w8a8"))) == {"head", "head.u8u8"}
    assert graph_kinds(("w8a8", "fp32", "fp32")) == {
        **{kind: "w8a8" for layer in layers for kind in (layer, f"{layer}.u8u8")},
        **{f"{layer}.fp32": "fp32" for layer in (*layers, "head")},
    }

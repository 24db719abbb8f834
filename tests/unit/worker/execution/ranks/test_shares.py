"""How a stage is cut among ranks."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.model import ModelConfig
from blockrelay.errors import UsageError
from blockrelay_worker.execution.ranks.shares import cut, whole


@pytest.fixture(scope="module")
def model(w8a8: BlockFolder) -> ModelConfig:
    return w8a8.model


def test_one_rank_has_everything(model: ModelConfig) -> None:
    alone, matrix = whole(model), np.arange(6).reshape(2, 3)
    assert alone.is_whole and alone.own("o", matrix) is matrix
    assert alone.columns("qkv")[-1].stop == model.qkv_columns


def test_two_ranks_have_half_of_each_matrix_in_whole_panels(model: ModelConfig) -> None:
    large = replace(
        model, heads=32, kv_heads=8, head_dim=64, hidden_size=2048, intermediate_size=5632, vocab_size=32000
    )
    for rank in (0, 1):
        mine = cut(large, 2, rank).mine
        sizes = [len(part) for part in (mine.heads, mine.kv_heads, mine.hidden, mine.mlp, mine.vocabulary)]
        assert sizes == [16, 4, 1024, 2816, 16000]


def test_shares_are_uneven_where_heads_are_odd(model: ModelConfig) -> None:
    """SmolLM2-135M has nine query heads and three key and value heads."""
    odd = replace(model, heads=9, kv_heads=3, head_dim=64, hidden_size=576)
    assert [share.heads for share in cut(odd, 2).shares] == [range(3), range(3, 9)]
    assert [share.kv_heads for share in cut(odd, 2).shares] == [range(1), range(1, 3)]


def test_more_ranks_than_key_heads_share_them(model: ModelConfig) -> None:
    shares = cut(replace(model, heads=9, kv_heads=3), 4).shares
    assert [share.kv_heads for share in shares] == [range(1), range(1, 2), range(2, 3), range(2, 3)]
    assert [share.heads for share in shares] == [range(3), range(3, 6), range(6, 7), range(7, 9)]


@pytest.mark.parametrize("ranks", [0, 5, 17])
def test_a_number_of_ranks_that_does_not_fit_is_refused(model: ModelConfig, ranks: int) -> None:
    with pytest.raises(UsageError, match="there must be 1 to 16 ranks" if ranks != 5 else "take at most 4"):
        cut(model, ranks)


@given(
    group=st.integers(1, 6), kv_heads=st.integers(1, 9), hidden=st.integers(8, 300), mlp=st.integers(8, 500),
    vocabulary=st.integers(8, 600), ranks=st.integers(1, 8),
)  # fmt: skip
def test_every_column_belongs_to_one_rank(
    group: int, kv_heads: int, hidden: int, mlp: int, vocabulary: int, ranks: int, model: ModelConfig
) -> None:
    shape = replace(
        model, heads=group * kv_heads, kv_heads=kv_heads, hidden_size=hidden, intermediate_size=mlp,
        vocab_size=vocabulary,
    )  # fmt: skip
    try:
        shares = cut(shape, ranks).shares
    except UsageError:
        assert ranks > kv_heads and -(-ranks // kv_heads) > group
        return
    for count, parts in [
        (shape.heads, [share.heads for share in shares]),
        (hidden, [share.hidden for share in shares]),
        (mlp, [share.mlp for share in shares]),
        (vocabulary, [share.vocabulary for share in shares]),
    ]:
        assert [n for part in parts for n in part] == list(range(count)) and all(parts)
    for share in shares:
        assert {head // group for head in share.heads} == set(share.kv_heads)
        assert len(share.heads) % len(share.kv_heads) == 0, "the kernels take as many query heads for each key head"
    for kind in ("qkv", "o", "gate_up", "down", "head"):
        columns = [n for rank in range(ranks) for part in cut(shape, ranks, rank).columns(kind) for n in part]
        assert set(columns) == set(range(shape.linear_shape(kind)[1]))
        assert kind == "qkv" or len(columns) == len(set(columns))

"""Names of pages say what is in them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockrelay_worker.kv.block_hashes import HASH_BYTES, extend_hashes, root_hash

ROOT = root_hash(salt="", model_hash="m", numerics="n")


def names_of(tokens: list[int], root: bytes = ROOT) -> list[bytes]:
    names: list[bytes] = []
    extend_hashes(names, root, tokens, len(tokens) // 16)
    return names


@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=80),
    st.lists(st.integers(0, 2**31 - 1), max_size=80),
)
def test_two_requests_share_exactly_the_names_of_their_common_full_pages(a: list[int], b: list[int]) -> None:
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    shared = sum(x == y for x, y in zip(names_of(a), names_of(b), strict=False))
    assert shared == common // 16


@given(st.lists(st.integers(0, 1000), min_size=96, max_size=96), st.lists(st.integers(0, 6), max_size=5))
def test_names_do_not_depend_on_the_steps_they_were_made_in(tokens: list[int], steps: list[int]) -> None:
    names: list[bytes] = []
    for pages in sorted(steps):
        extend_hashes(names, ROOT, tokens, pages)
    extend_hashes(names, ROOT, tokens, 6)
    assert names == names_of(tokens)
    assert {len(name) for name in names} == {HASH_BYTES}


@pytest.mark.parametrize(
    "other",
    [
        {"salt": "t", "model_hash": "m", "numerics": "n"},
        {"salt": "", "model_hash": "m2", "numerics": "n"},
        {"salt": "", "model_hash": "m", "numerics": "n2"},
        {"salt": "m", "model_hash": "", "numerics": "n"},
        {"salt": "", "model_hash": "mn", "numerics": ""},
    ],
)
def test_another_salt_model_or_numerics_shares_nothing(other: dict[str, str]) -> None:
    tokens = list(range(64))
    assert set(names_of(tokens)).isdisjoint(names_of(tokens, root_hash(**other)))


def test_the_same_page_of_tokens_at_another_place_has_another_name() -> None:
    assert len(set(names_of([7] * 64))) == 4


def test_the_names_are_a_format_that_other_versions_read() -> None:
    """Pages outlive the process that named them: a change here must change the numerics id or the page header."""
    assert names_of(list(range(32)))[1].hex().startswith("bea50531067160ef")


def test_a_page_that_is_not_full_gets_no_name() -> None:
    with pytest.raises(AssertionError, match="no hash"):
        extend_hashes([], ROOT, [1] * 31, 2)

"""Every gateway ranks cells alike, by their weights, and a list that changes moves as little as it can."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockrelay_gateway.cells.rendezvous import ranked

#: The order of four names.
FIXED = ["c2c1c0", "c2c0c1", "c0c2c1", "c2c1c0"]
NAMES = [f"name-{i}" for i in range(6000)]
WEIGHTS = st.dictionaries(st.from_regex(r"c[0-9]{1,3}", fullmatch=True), st.integers(1, 100), min_size=1, max_size=8)


def test_it_is_the_same_everywhere_and_for_ever() -> None:
    """Other figures than these would move every key that is in use."""
    weights = {"c0": 1, "c1": 1, "c2": 2}
    assert ["".join(ranked(name, weights)) for name in ("a", "b", "session/ada/s", "req-" + "0" * 24)] == FIXED


@pytest.mark.parametrize("weights", [{"c0": 1, "c1": 1}, {"c0": 1, "c1": 2, "c2": 5}, {"a": 7, "b": 7, "c": 7, "d": 1}])
def test_each_cell_is_first_for_its_share(weights: dict[str, int]) -> None:
    first = Counter(ranked(name, weights)[0] for name in NAMES)
    for cell, weight in weights.items():
        share = weight / sum(weights.values())
        spread = (share * (1 - share) / len(NAMES)) ** 0.5
        assert abs(first[cell] / len(NAMES) - share) < 4 * spread


@given(WEIGHTS, st.text(min_size=1))
def test_a_cell_without_a_weight_is_none_and_order_of_the_list_means_nothing(
    weights: dict[str, int], name: str
) -> None:
    order = ranked(name, weights)
    assert sorted(order) == sorted(weights)
    assert ranked(name, {**dict(reversed(weights.items())), "closed": 0}) == order


@given(WEIGHTS, st.text(min_size=1), st.integers(1, 100))
def test_one_more_cell_moves_nothing_between_the_others(weights: dict[str, int], name: str, weight: int) -> None:
    order = ranked(name, {**weights, "new": weight})
    assert [cell for cell in order if cell != "new"] == ranked(name, weights)


@given(WEIGHTS, st.text(min_size=1), st.data())
def test_a_heavier_cell_only_gains(weights: dict[str, int], name: str, data: st.DataObject) -> None:
    cell = data.draw(st.sampled_from(sorted(weights)))
    before = ranked(name, weights).index(cell)
    assert ranked(name, {**weights, cell: weights[cell] + 1}).index(cell) <= before

"""`bench.scenarios.distributor` measures what it says, on the bundled model."""

from bench.hop import one_way_s
from bench.scenarios.distributor import loading
from blockrelay.settings import BUNDLED_MODEL


def test_a_row_comes_back_from_another_process() -> None:
    assert one_way_s(64, runs=5) > 0


def test_loading_and_splitting_take_time_each() -> None:
    figures = loading(BUNDLED_MODEL)
    assert set(figures) == {"load_s", "split_s", "weights_s", "init_s"}
    assert min(figures.values()) > 0

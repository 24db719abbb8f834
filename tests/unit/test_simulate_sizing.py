"""Sizes of systems and fitted costs, compared with sums by hand."""

import json
from dataclasses import replace

import pytest

from bench.simulate.costs import BlockCosts, Costs
from bench.simulate.measured.least_squares import least
from bench.simulate.million import DATA, PAGE, parts, written
from bench.simulate.sizing import SHARE, Footprint, Machine, Model, Sized, Target, size, workers

TARGET = Target(streams=1000, tokens_per_s=10, prompt=100, new=100)
MODEL = Model(parameters=1e9, weight_bytes=1e9, kv_bytes=1e5)
MACHINE = Machine(name="one", bytes_per_s=1e18, operations_per_s=1e18, memory=1e18, slots=50)
COSTS = Costs(blocks=(BlockCosts(rows={1: 0.0}),) * 2, commit_token=0.0001, gateway_token=0.001)
FOOTPRINT = Footprint(
    redis_request=1000,
    redis_ended=100,
    redis_token=10,
    redis_read_stream=0,
    gateway_stream=1e4,
    client_token=300,
    retention_s=10,
)


def sized(costs: Costs = COSTS, *, redis_memory: float = 1e12) -> Sized:
    return size(costs, FOOTPRINT, TARGET, MODEL, MACHINE, redis_memory=redis_memory)


class TestWorkers:
    def test_slots_bound_what_is_fast_and_large(self) -> None:
        found = workers(TARGET, MODEL, MACHINE)
        assert (found.streams, found.bound, found.count) == (50, "slots", 20)

    def test_memory_has_weights_and_all_tokens_of_a_stream(self) -> None:
        found = workers(TARGET, MODEL, replace(MACHINE, memory=1e9 + 7 * 200 * 1e5))
        assert (found.streams, found.bound) == (7, "memory")

    def test_reading_takes_weights_once_and_the_mean_context_of_each_stream(self) -> None:
        step = SHARE / TARGET.tokens_per_s
        found = workers(TARGET, MODEL, replace(MACHINE, bytes_per_s=(1e9 + 20 * 150 * 1e5) / step))
        assert (found.streams, found.bound, found.step_s) == (20, "reading", pytest.approx(step))

    def test_computing_has_a_row_of_the_prompt_for_each_token(self) -> None:
        step = SHARE / TARGET.tokens_per_s
        found = workers(TARGET, MODEL, replace(MACHINE, operations_per_s=2 * 1e9 * 2 * 30 / step))
        assert (found.streams, found.bound, found.step_s) == (30, "computing", pytest.approx(step))

    def test_a_machine_that_serves_nobody_is_refused(self) -> None:
        with pytest.raises(ValueError, match="memory"):
            workers(TARGET, MODEL, replace(MACHINE, memory=1e9))


class TestCells:
    def test_the_thread_of_redis_is_filled_to_its_share(self) -> None:
        found = sized()
        assert (found.cell_streams, found.cells, found.cell_use.largest) == (700, 2, "tokens")
        assert found.cell_use.thread == pytest.approx(SHARE)

    def test_its_memory_may_come_first(self) -> None:
        found = sized(redis_memory=100 * (1000 + 0.1 * 10 * 100) / SHARE)
        assert (found.cell_streams, found.cell_use.largest) == (100, "memory")

    def test_gateways_have_a_core_each(self) -> None:
        found = sized()
        assert (found.gateway_streams, found.gateways, found.gateway_bound) == (70, 15, "tokens")

    def test_bytes_are_those_of_all_streams(self) -> None:
        found = sized()
        assert found.client_bytes_per_s == pytest.approx(1000 * 10 * 300)
        assert found.redis_bytes_per_s == pytest.approx(1000 * 10 * 10)
        assert found.gateway_bytes == pytest.approx(1e7)


class TestFitting:
    def test_costs_are_found_again(self) -> None:
        rows = [(1, 10), (2, 5), (3, 40)]
        assert least(rows, [a * 3 + b * 0.5 for a, b in rows]) == pytest.approx([3, 0.5])

    def test_none_is_negative(self) -> None:
        first, second = least([(1, 1), (1, 2), (1, 3)], [3, 2, 1])
        assert second == 0
        assert first > 0


def test_only_what_is_between_the_marks_of_the_page_changes() -> None:
    page = "a\n<!-- generated: one -->\nold\n<!-- end -->\nb\n<!-- generated: two -->\n<!-- end -->\n"
    once = written(page, {"one": "1", "two": "2"})
    assert once == "a\n<!-- generated: one -->\n\n1\n\n<!-- end -->\nb\n<!-- generated: two -->\n\n2\n\n<!-- end -->\n"
    assert written(once, {"one": "1", "two": "2"}) == once


def test_the_page_is_what_its_data_say() -> None:
    page = PAGE.read_text()
    assert written(page, parts(json.loads(DATA.read_text()))) == page, "python -m bench.simulate.million writes it anew"

"""The simulator, compared with figures that follow from its costs by hand."""

from dataclasses import replace

import pytest

from bench.simulate.clock import Clock, Host, Process
from bench.simulate.control_redis import ControlRedis
from bench.simulate.costs import BlockCosts, Costs
from bench.simulate.load import Lengths, Load
from bench.simulate.system import Setup, simulate

pytestmark = pytest.mark.thorough


def steps(alone: float, row: float = 0.0, *, head: float = 0.0) -> tuple[BlockCosts, ...]:
    """A layer and a head that have their shares of so long, and of so much more for each row."""
    return tuple(BlockCosts(rows={rows: share * (alone + rows * row) for rows in (1, 2)}) for share in (1 - head, head))


NOTHING = Costs(blocks=steps(0.010), speeds=(1.0, 2.0, 3.0, 4.0))
APART = Setup(one_host=False)


def closed(clients: int, *, prompt: int = 1, new: int = 100) -> Load:
    return Load(prompt=Lengths.of(prompt), new=Lengths.of(new), clients=clients)


def rate(setup: Setup, load: Load, costs: Costs) -> float:
    return simulate(setup, load, costs, seconds=20, warm_up=2).figures.tokens_per_second


class TestHost:
    def ends(self, speeds: tuple[float, ...], *works: float, turn: float = 0.0) -> list[float]:
        clock, found = Clock(), list[float]()
        host = Host(clock, speeds, turn)
        for work in works:
            host.compute(work, lambda: found.append(clock.now))
        clock.run(100)
        return found

    def test_one_process_is_as_fast_as_alone(self) -> None:
        assert self.ends((1.0,), 2.0) == [2.0]

    def test_processes_share_a_core_in_equal_parts(self) -> None:
        assert self.ends((1.0,), 1.0, 3.0) == pytest.approx([2.0, 4.0], rel=0.001)

    def test_they_take_turns_and_wait_for_their_own(self) -> None:
        """0 to 2, 2 to 4, 4 to 5 and 5 to 6."""
        assert self.ends((1.0,), 3.0, 3.0, turn=2.0) == pytest.approx([5.0, 6.0])

    def test_who_sleeps_gives_the_core_away_before_the_turn_is_over(self) -> None:
        assert self.ends((1.0,), 1.0, 3.0, turn=2.0) == pytest.approx([1.0, 4.0])

    def test_who_does_the_next_thing_stays_where_it_is(self) -> None:
        clock, found = Clock(), list[float]()
        host = Host(clock, (1.0,), 2.0)
        host.compute(1.0, lambda: host.compute(1.0, lambda: found.append(clock.now)))
        host.compute(1.0, lambda: found.append(clock.now))
        clock.run(10)
        assert found == pytest.approx([2.0, 3.0])

    def test_two_threads_of_one_core_get_done_what_they_do(self) -> None:
        assert self.ends((1.0, 1.25), 1.0, 1.0) == pytest.approx([1.6, 1.6])

    def test_who_comes_later_slows_down_what_is_left(self) -> None:
        clock, found = Clock(), dict[str, float]()
        host = Host(clock, (1.0,), turn_s=0.01)
        host.compute(2.0, lambda: found.update(first=clock.now))
        clock.at(1.0, lambda: host.compute(0.5, lambda: found.update(second=clock.now)))
        clock.run(10)
        assert found == pytest.approx({"second": 2.0, "first": 2.5}, abs=0.02)

    def test_a_process_does_one_thing_after_the_other(self) -> None:
        clock, found = Clock(), list[float]()
        process = Process(Host(clock, (1.0, 2.0)))
        for _ in range(3):
            process.do(1.0, lambda: found.append(clock.now))
        clock.run(10)
        assert found == [1.0, 2.0, 3.0]


class TestOneWorker:
    def test_one_stream_has_a_token_each_step(self) -> None:
        assert rate(APART, closed(1), NOTHING) == pytest.approx(100, rel=0.01)

    def test_streams_share_steps_for_nothing_where_rows_cost_nothing(self) -> None:
        assert rate(APART, closed(16), NOTHING) == pytest.approx(1600, rel=0.02)

    def test_and_not_beyond_what_a_worker_runs_at_once(self) -> None:
        assert rate(APART, closed(128), NOTHING) == pytest.approx(6400, rel=0.02)

    def test_rows_cost_what_they_cost(self) -> None:
        costs = replace(NOTHING, blocks=steps(0.010, 0.001))
        assert rate(APART, closed(10), costs) == pytest.approx(10 / 0.020, rel=0.02)

    def test_commits_are_beside_the_next_step(self) -> None:
        costs = replace(NOTHING, commit=0.002, fsync=(0.005,))
        assert rate(APART, closed(1, new=1000), costs) == pytest.approx(100, rel=0.01)

    def test_but_a_redis_that_takes_longer_than_steps_holds_them_up_at_the_end(self) -> None:
        costs = replace(NOTHING, fsync=(0.050,))
        seen = simulate(APART, closed(1, new=10), costs, seconds=20)
        assert seen.figures.first_token_s == pytest.approx(0.210, abs=0.005), (
            "ACCEPT, a wake, CLAIM, COMMIT: each synced"
        )

    @pytest.mark.parametrize(("computing", "wait_s"), [(0, 0.001), (1, 0.030), (3, 0.030)])
    def test_whose_disk_takes_longer_beside_processes_that_compute(self, computing: int, wait_s: float) -> None:
        clock, found = Clock(), list[float]()
        host = Host(clock, NOTHING.speeds)
        for _ in range(computing):
            host.compute(1.0, lambda: None)
        redis = ControlRedis(clock, host, replace(NOTHING, fsync=(0.001, 0.030)))
        redis.call(lambda: (0.0, True), lambda: found.append(clock.now))
        clock.run(1)
        assert found == pytest.approx([wait_s])

    def test_a_prompt_is_computed_before_its_first_token(self) -> None:
        costs = replace(NOTHING, blocks=steps(0.0, 0.001))
        seen = simulate(APART, closed(1, prompt=300, new=2), costs, seconds=20)
        assert seen.figures.first_token_s == pytest.approx(0.300, rel=0.01)
        assert seen.figures.between_tokens_s == pytest.approx(0.001, rel=0.01)


class TestStages:
    def test_a_token_goes_through_all_stages_and_hops(self) -> None:
        costs = replace(NOTHING, blocks=steps(0.010, head=0.5), hop=0.001)
        token = 2 * 0.005 + 2 * 0.001 + 0.0005  # at the end COMMIT's own message, which the first stage reads and drops
        assert rate(Setup(workers=2, stages=2, one_host=False), closed(1), costs) == pytest.approx(1 / token, rel=0.01)

    def test_groups_keep_all_stages_busy(self) -> None:
        costs = replace(NOTHING, blocks=steps(0.0, 0.002, head=0.5))
        one = rate(Setup(workers=2, stages=2, groups=1, one_host=False), closed(8), costs)
        two = rate(Setup(workers=2, stages=2, groups=2, one_host=False), closed(8), costs)
        assert (one, two) == (pytest.approx(500, rel=0.03), pytest.approx(1000, rel=0.05))


class TestCells:
    def test_cells_share_nothing(self) -> None:
        costs = replace(NOTHING, blocks=steps(0.0, 0.001))
        one = rate(Setup(cells=1, one_host=False), closed(16), costs)
        four = rate(Setup(cells=4, one_host=False), closed(64), costs)
        assert four == pytest.approx(4 * one, rel=0.02)

    def test_a_redis_is_what_bounds_a_cell_in_the_end(self) -> None:
        costs = replace(NOTHING, commit_token=0.001)
        seen = simulate(Setup(workers=8, one_host=False), closed(64, new=10), costs, seconds=20, warm_up=5)
        assert seen.figures.tokens_per_second == pytest.approx(1000, rel=0.02)
        assert seen.busy["control Redis"] > 0.97

    def test_requests_that_wait_for_nobody_are_all_served_below_capacity(self) -> None:
        load = Load(prompt=Lengths(1, 9), new=Lengths(5, 15), per_second=20)
        seen = simulate(Setup(cells=2, one_host=False), load, NOTHING, seconds=60, warm_up=5)
        assert seen.figures.tokens_per_second == pytest.approx(200, rel=0.1)
        again = simulate(Setup(cells=2, one_host=False), load, NOTHING, seconds=60, warm_up=5)
        assert again == seen, "the same seed is the same run"

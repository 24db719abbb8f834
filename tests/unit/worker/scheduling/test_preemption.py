"""Preemption: which run gets pages when too few are free, as tables of data and as a simulated pool."""

from hypothesis import given
from hypothesis import strategies as st

from blockrelay_worker.scheduling.preemption import Holding, claimable_pages, startable, victim


def test_the_youngest_with_pages_gives_way_and_nobody_older_does() -> None:
    runs = [Holding("old", 4, 5), Holding("mid", 2, 3), Holding("young", 3, 3), Holding("waiting", 0, 2)]
    assert victim(runs, "old") == "young"
    assert victim(runs, "mid") == "young"
    assert victim(runs, "young") is None
    assert victim(runs[:2], "old") == "mid"


def test_a_run_without_pages_starts_when_all_its_tokens_fit_beside_the_running_ones() -> None:
    running, preempted = Holding("a", 2, 3), Holding("b", 0, 4)
    assert startable([running, preempted], free=5) == {"a", "b"}
    assert startable([running, preempted], free=4) == {"a"}


def test_the_older_of_two_without_pages_starts_first_and_is_not_overtaken() -> None:
    runs = [Holding("a", 2, 2), Holding("large", 0, 4), Holding("small", 0, 1)]
    assert startable(runs, free=3) == {"a"}
    assert startable(runs, free=4) == {"a", "large"}


def test_the_oldest_always_may_start() -> None:
    assert startable([Holding("a", 0, 9), Holding("b", 5, 5)], free=0) == {"a", "b"}


def test_new_jobs_get_what_the_runs_here_leave() -> None:
    assert claimable_pages([], free=10) == 10
    assert claimable_pages([Holding("a", 2, 3), Holding("b", 0, 4)], free=10) == 3
    assert claimable_pages([Holding("a", 2, 9)], free=5) == 0


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 120)), min_size=1, max_size=8), st.integers(10, 14))
def test_everybody_finishes_however_small_the_pool(jobs: list[tuple[int, int]], pool: int) -> None:
    """Each job (prompt, new tokens) that fits alone: played with one page per token, a token each per round."""
    lives = {f"r{i}": [min(p, pool - 2), 0] for i, (p, _) in enumerate(jobs)}  # known tokens, pages
    ends = {f"r{i}": min(min(p, pool - 2) + new, pool - 1) for i, (p, new) in enumerate(jobs)}
    for _ in range(10_000):
        if not lives:
            break

        def holdings() -> list[Holding]:
            return [Holding(name, has, tokens + 1) for name, (tokens, has) in lives.items()]

        def free() -> int:
            return pool - sum(has for _, has in lives.values())

        for name in [n for n in lives if n in startable(holdings(), free())]:
            run = lives[name]
            chosen_before = run[1]
            while run[0] - run[1] > free():
                loser = victim(holdings(), name)
                if loser is None:
                    break
                lives[loser][1] = 0
            if run[1] != chosen_before or run[0] - run[1] > free():
                continue
            run[1] = run[0]
            run[0] += 1
        for name in [n for n, (tokens, _) in lives.items() if tokens >= ends[n]]:
            del lives[name]
    assert not lives

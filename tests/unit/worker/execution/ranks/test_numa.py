"""Which processors the ranks of a machine with several NUMA nodes are bound to."""

import os
import sys
from pathlib import Path

import pytest

from blockrelay_worker.execution.ranks.numa import bind, cpus_of, nodes, parse_list

TWO = {0: frozenset(range(4)), 1: frozenset(range(4, 8))}


@pytest.mark.parametrize(
    ("rank", "ranks", "expected"),
    [(0, 2, range(4)), (1, 2, range(4, 8)), (1, 4, range(4)), (2, 4, range(4, 8)), (0, 1, ()), (2, 3, range(4, 8))],
)
def test_neighbouring_ranks_share_a_node(rank: int, ranks: int, expected: range) -> None:
    assert cpus_of(rank, ranks, TWO, range_of(8)) == frozenset(expected)


def test_nodes_whose_processors_are_not_allowed_do_not_count() -> None:
    assert cpus_of(1, 2, TWO, range_of(4)) == frozenset()
    assert cpus_of(1, 2, TWO, range_of(6)) == {4, 5}


def test_a_machine_is_read_from_the_system(tmp_path: Path) -> None:
    for number, cpus in {0: "0-1,4\n", 1: "2-3\n", 2: "rubbish\n"}.items():
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cpus)
    assert nodes(tmp_path) == {0: {0, 1, 4}, 1: {2, 3}}
    assert parse_list("\n") == frozenset()


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_a_machine_with_one_node_is_left_alone(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    bind(1, 2, root=tmp_path)
    assert os.sched_getaffinity(0) == before


def range_of(count: int) -> frozenset[int]:
    return frozenset(range(count))

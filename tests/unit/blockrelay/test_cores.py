"""Cores that a process may use: by its affinity, and by the quotas of its control groups and of those above them."""

import os
from pathlib import Path

import pytest

from blockrelay.errors import UsageError
from blockrelay.host.cpu import check_threads, cores
from blockrelay.settings import WorkerSettings, read_settings
from tests.support.control_groups import write_groups

FOUR = frozenset(range(4))
V1 = "4:memory:/\n2:cpu,cpuacct:{path}\n1:name=systemd:/\n"


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: FOUR)  # pyright: ignore[reportUnknownLambdaType]


def test_without_control_groups_the_affinity_counts(tmp_path: Path) -> None:
    assert cores(root=tmp_path) == 4


def test_a_container_of_version_2_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    assert cores(root=write_groups(tmp_path, "0::/\n", {"": {"cpu.max": "100000 100000"}})) == 1
    assert cores(root=write_groups(tmp_path, "0::/\n", {"": {"cpu.max": "max 100000"}})) == 4


def test_a_part_of_a_core_counts_as_one_and_there_is_always_one(tmp_path: Path) -> None:
    assert cores(root=write_groups(tmp_path, "0::/\n", {"": {"cpu.max": "150000 100000"}})) == 2
    assert cores(root=write_groups(tmp_path, "0::/\n", {"": {"cpu.max": "1000 100000"}})) == 1
    assert cores(root=write_groups(tmp_path, "0::/\n", {"": {"cpu.max": "6400000 100000"}})) == 4, "the affinity"


def test_the_least_of_all_levels_counts(tmp_path: Path) -> None:
    groups = {"a/b/c": {"cpu.max": "max 100000"}, "a/b": {"cpu.max": "300000 100000"}, "a": {"cpu.max": "20000 10000"}}
    assert cores(root=write_groups(tmp_path, "0::/a/b/c\n", groups)) == 2
    groups["a/b/c"] = {"cpu.max": "50000 50000"}
    assert cores(root=write_groups(tmp_path, "0::/a/b/c\n", groups)) == 1


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_quotas_of_version_1_are_two_files(tmp_path: Path, mount: str) -> None:
    quota = {"cpu.cfs_quota_us": 200_000, "cpu.cfs_period_us": 100_000}
    none = {"cpu.cfs_quota_us": -1, "cpu.cfs_period_us": 100_000}
    groups = {f"{mount}/docker/id": none, f"{mount}/docker": quota, mount: none}
    assert cores(root=write_groups(tmp_path, V1.format(path="/docker/id"), groups, unified=False)) == 2
    assert cores(root=write_groups(tmp_path, V1.format(path="/"), groups, unified=False)) == 4


def test_a_path_of_the_host_that_the_container_cannot_see_ends_at_its_mount(tmp_path: Path) -> None:
    quota = {"cpu.cfs_quota_us": 100_000, "cpu.cfs_period_us": 100_000}
    own = V1.format(path="/kubepods/pod1/container")
    assert cores(root=write_groups(tmp_path, own, {"cpu": quota}, unified=False)) == 1


def test_a_group_within_a_container_whose_path_begins_outside_is_found(tmp_path: Path) -> None:
    groups = {"": {"cpu.max": "max 100000"}, "inner": {"cpu.max": "100000 100000"}}
    assert cores(root=write_groups(tmp_path, "0::/kubepods/pod1/container/inner\n", groups)) == 1
    assert cores(root=write_groups(tmp_path, "0::/../inner\n", groups)) == 1


def test_version_2_beside_version_1_has_its_own_mount(tmp_path: Path) -> None:
    own = V1.format(path="/") + "0::/user\n"
    groups = {"unified": {"cgroup.controllers": "cpu"}, "unified/user": {"cpu.max": "100000 100000"}}
    assert cores(root=write_groups(tmp_path, own, groups, unified=False)) == 1


def test_threads_that_only_wait_for_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_threads(None) is None and check_threads(16) == 16
    with pytest.raises(UsageError, match="17 threads are too many for the 4 cores of this machine: take at most 16"):
        check_threads(17)
    assert read_settings(WorkerSettings, ["--threads", "16"], program="worker").threads == 16
    with pytest.raises(UsageError, match=r"BLOCKRELAY_THREADS: .*take at most 16"):
        read_settings(WorkerSettings, ["--threads", "5000"], program="worker")

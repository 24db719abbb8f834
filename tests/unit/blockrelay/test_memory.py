"""Memory that may be taken, on a machine, in a container, and where nobody says."""

from pathlib import Path

from blockrelay.host.memory import available_bytes


def machine(root: Path, *, free_kib: int, limit: str | None = None, used: int = 0) -> int:
    (root / "meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable:   {free_kib} kB\n")
    if limit is not None:
        (root / "memory.max").write_text(f"{limit}\n")
        (root / "memory.current").write_text(f"{used}\n")
    return available_bytes(meminfo=root / "meminfo", cgroup=root)


def test_without_a_limit_it_is_what_the_machine_has_free(tmp_path: Path) -> None:
    assert machine(tmp_path, free_kib=100) == 100 * 1024
    assert machine(tmp_path, free_kib=100, limit="max") == 100 * 1024


def test_a_container_may_take_what_its_limit_leaves(tmp_path: Path) -> None:
    assert machine(tmp_path, free_kib=100, limit="5000", used=2000) == 3000
    assert machine(tmp_path, free_kib=1, limit="5000", used=2000) == 1024
    assert machine(tmp_path, free_kib=100, limit="5000", used=6000) == 0


def test_elsewhere_it_is_half_of_all_memory(tmp_path: Path) -> None:
    assert available_bytes(meminfo=tmp_path / "none", cgroup=tmp_path) > 1 << 20

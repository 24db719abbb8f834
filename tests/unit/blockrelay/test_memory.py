"""Memory that a process may take: on a machine, in a container, and on systems that do not report it."""

from pathlib import Path

import pytest

from blockrelay.host.memory import allowed_bytes, available_bytes, total_bytes
from blockrelay_launcher.supervisor import embedded_redis
from blockrelay_launcher.supervisor.embedded_redis import EmbeddedRedis, ServerProgram
from tests.support.control_groups import GIB, write_free, write_groups

MUCH_KIB = 1 << 30
OWN_V2, OWN_V1 = "0::/a/b\n", "4:memory:/a/b\n"


def stat(**bytes_by_name: int) -> str:
    return "\n".join(f"{name} {count}" for name, count in bytes_by_name.items())


def test_without_a_limit_it_is_what_the_machine_has_free(tmp_path: Path) -> None:
    write_free(tmp_path, 100)
    assert available_bytes(root=tmp_path) == 100 * 1024
    write_groups(tmp_path, "0::/\n", {"": {"memory.max": "max", "memory.current": 5000}})
    assert available_bytes(root=tmp_path) == 100 * 1024
    assert allowed_bytes(root=tmp_path) == total_bytes()


def test_a_container_may_take_what_its_limit_leaves(tmp_path: Path) -> None:
    write_groups(tmp_path, "0::/\n", {"": {"memory.max": 5000, "memory.current": 2000}})
    assert available_bytes(root=write_free(tmp_path, 100)) == 3000
    assert available_bytes(root=write_free(tmp_path, 1)) == 1024
    write_groups(tmp_path, "0::/\n", {"": {"memory.max": 5000, "memory.current": 6000}})
    assert available_bytes(root=write_free(tmp_path, 100)) == 0


def test_the_page_cache_of_a_container_is_free(tmp_path: Path) -> None:
    own = {
        "memory.max": 8 * GIB,
        "memory.current": 8 * GIB - (64 << 20),
        "memory.stat": stat(
            anon=GIB // 2,
            file=7 * GIB,
            active_file=5 * GIB,
            inactive_file=2 * GIB,
            slab_reclaimable=GIB // 4,
            shmem=GIB,
        ),
    }
    write_groups(write_free(tmp_path, MUCH_KIB), "0::/\n", {"": own})
    assert available_bytes(root=tmp_path) == 7 * GIB + GIB // 4 + (64 << 20)


def test_the_nearest_limit_of_all_levels_counts(tmp_path: Path) -> None:
    groups = {
        "a/b": {"memory.max": 4 * GIB, "memory.current": GIB, "memory.stat": stat(inactive_file=GIB)},
        "a": {"memory.max": 6 * GIB, "memory.current": 5 * GIB, "memory.stat": stat(inactive_file=GIB)},
    }
    write_groups(write_free(tmp_path, MUCH_KIB), OWN_V2, groups)
    assert available_bytes(root=tmp_path) == 2 * GIB, "of the group above, which others fill"
    assert allowed_bytes(root=tmp_path) == min(total_bytes(), 4 * GIB)


def test_where_the_kernel_slows_a_process_down_is_a_limit_too(tmp_path: Path) -> None:
    own = {"memory.max": "max", "memory.high": 3 * GIB, "memory.current": GIB}
    write_groups(write_free(tmp_path, MUCH_KIB), "0::/\n", {"": own})
    assert available_bytes(root=tmp_path) == 2 * GIB


def test_version_1_has_other_names_and_a_number_for_no_limit(tmp_path: Path) -> None:
    cached = stat(inactive_file=1, total_active_file=GIB, total_inactive_file=2 * GIB)
    groups = {
        "memory/a/b": {"memory.limit_in_bytes": 9223372036854771712, "memory.usage_in_bytes": GIB},
        "memory/a": {
            "memory.limit_in_bytes": 8 * GIB,
            "memory.usage_in_bytes": 7 * GIB,
            "memory.stat": cached,
        },
    }
    write_groups(write_free(tmp_path, MUCH_KIB), OWN_V1, groups, unified=False)
    assert available_bytes(root=tmp_path) == 4 * GIB
    assert allowed_bytes(root=tmp_path) == min(total_bytes(), 8 * GIB)


def test_elsewhere_it_is_half_of_all_memory(tmp_path: Path) -> None:
    assert available_bytes(root=tmp_path) > 1 << 20


def test_a_payload_redis_takes_a_quarter_of_what_we_may_take(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded_redis, "allowed_bytes", lambda: 400)
    server = EmbeddedRedis(
        program=ServerProgram("redis-server", (7,)), folder=tmp_path, socket=tmp_path / "s", durable=False
    )
    command = server.command()
    assert command[command.index("--maxmemory") + 1] == "100"

"""Fixtures of systems that tests may break: every server and process belongs to the test alone."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.redis.redis_server import RedisServer
from tests.support.systems.system import StartSystem, System


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder in memory, as a launcher makes it; a plain one where there is no /dev/shm."""
    root = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="blockrelay-test-", dir=root))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def start_system(tiny_model: Path) -> Iterator[StartSystem]:
    """`start_system(stages=2, replicas=1, worker={...}, model=folder)`: returns when a token can be produced."""
    with ExitStack() as stack:

        def start(
            *,
            stages: int = 1,
            replicas: int = 1,
            scheduler: bool = True,
            worker: dict[str, str] | None = None,
            scheduler_env: dict[str, str] | None = None,
            model: Path = tiny_model,
            fsync: str = "always",
            redis_env: dict[str, str] | None = None,
            cell: str = "t",
        ) -> System:
            folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="br-sys-", ignore_cleanup_errors=True))
            )
            control = RedisServer(folder / "c", fsync=fsync, env=redis_env).start()
            payload = RedisServer(folder / "p", durable=False).start()
            stack.callback(payload.stop)
            stack.callback(control.stop)
            stack.callback(control.assert_nothing_is_ownerless)
            system = System(folder=folder, model=model, control=control, payload=payload, stages=stages, cell=cell)
            system.scheduler_env = scheduler_env or {}
            stack.callback(system.stop)
            if scheduler:
                system.start_scheduler()
            for _ in range(stages * replicas):
                system.start_worker(**(worker or {}))
            if scheduler:
                system.wait_ready(stages * replicas)
            return system

        yield start

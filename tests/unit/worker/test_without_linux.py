"""A worker on Windows: what it imports is there, or asked for only where it is.

Nothing of Windows is here to try. `make check` types both packages for it; here they are imported by a Python that has
none of what only Unix has.
"""

import os
import subprocess
import sys
import textwrap

PROGRAM = """
    import importlib, mmap, os, pkgutil, signal, sys
    for name in ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"):
        sys.modules[name] = None
    # These may use what they find, and are others on Windows.
    import multiprocessing.shared_memory, numpy, redis, redis.asyncio, msgpack, msgpack_numpy, onnx, onnx.helper
    import onnxruntime, prometheus_client, pydantic_settings, structlog, tokenizers, typer
    for module, names in {
        os: "fork getuid pread sched_getaffinity sysconf writev O_CLOEXEC O_NOFOLLOW",
        signal: "ITIMER_REAL SIGALRM SIGKILL SIGSTOP pthread_kill setitimer",
        mmap: "MADV_HUGEPAGE MAP_ANONYMOUS MAP_PRIVATE",
    }.items():
        for name in names.split():
            delattr(module, name)
    sys.platform = "win32"
    import blockrelay, blockrelay_worker
    for package in (blockrelay, blockrelay_worker):
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not found.name.endswith("__main__") and ".kernels._" not in found.name:  # those are no modules
                importlib.import_module(found.name)
                print(found.name)
    import blockrelay_worker.__main__, blockrelay_worker.execution.process.__main__
"""


def test_both_packages_are_imported_whole() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert {"blockrelay.failpoints", "blockrelay_worker.engine.loop", "blockrelay_worker.kernels.native"} <= set(
        done.stdout.split()
    )

"""GPU workers that fail, beside a running `blockrelay up`."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import connect
from blockrelay.redis.registry import read_plan, read_workers
from tests.support.systems.system import FAILING_GPU
from tests.support.systems.up_process import UpProcess
from tests.support.waiting import wait_until

CELL = "c0"


@contextmanager
def failing_gpus(up: UpProcess, model: Path, count: int, *, after: int) -> Iterator[None]:
    """`count` of them, planned; each fails after so many batches. They end before `up` does: inside its `with`."""
    control, payload = up.redis_urls()
    told = {
        "BLOCKRELAY_REDIS_URL": control,
        "BLOCKRELAY_PAYLOAD_REDIS_URL": payload,
        "BLOCKRELAY_MODEL": str(model),
        "BLOCKRELAY_DEVICE": "gpu",
        "FAIL_AFTER": str(after),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    key, keys = open_block_folder(model, blocks=[]).model_key, Keys(CELL)
    workers = [subprocess.Popen([sys.executable, "-m", FAILING_GPU], env=os.environ | told) for _ in range(count)]
    try:
        with connect(control) as client:

            def planned() -> bool:
                plan = read_plan(client, keys, key)
                ready = [one for one in read_workers(client, keys, key) if one.device == "gpu" and one.ready]
                return plan is not None and plan.route_class == "gpu" and len(ready) == count

            wait_until(planned, "the plan has GPU stages")
        yield
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()

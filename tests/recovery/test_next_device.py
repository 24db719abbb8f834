"""A device of a worker that cannot do its work, and what becomes of the worker and its requests.

Devices are ONNX Runtime's own CPU provider under several names (tests/support/worker/failing_child.py).
"""

from pathlib import Path

from blockrelay.redis.registry import read_lost_devices
from tests.support.logs import entries
from tests.support.scraping import sampled
from tests.support.systems.gpu_systems import jobs_of, on_gpu, with_gpu
from tests.support.systems.system import Job, StartSystem, System, assert_nothing_is_held, make_jobs, scrape
from tests.support.waiting import wait_until
from tests.support.worker.misbehaving_python import misbehaving_python


def run(system: System, jobs: list[Job]) -> int:
    """How many times they went from a GPU to a CPU. Each has all its tokens."""
    system.accept_all(jobs)
    system.wait_all(jobs)
    moved = 0
    for job in jobs:
        tokens, end = system.log(job.request_id)
        assert end is not None and end.reason == "length" and len(tokens) == job.params.max_tokens
        assert all((event.source, event.target, event.success) == ("GPU", "CPU", True) for event in end.fallbacks)
        moved += len(end.fallbacks)
    assert_nothing_is_held(system)
    return moved


def test_a_device_whose_steps_fail_gives_way_to_the_next_one(start_system: StartSystem, tmp_path: Path) -> None:
    """Its requests go on at CPUs, and its worker comes back on another device, as which it is then known."""
    python = misbehaving_python(tmp_path, RUNS_FAIL_ON="cpu:0", FAIL_FROM="30", FAIL_TEXT="moon phase")
    system = with_gpu(start_system, gpu="cpu:0", gpu_fallbacks="cpu:1", gpu_python=python)
    (before,), worker = on_gpu(system), system.workers[-1]
    assert run(system, jobs_of(system)) > 0, "none was on the GPU"
    system.wait_ready(3)
    (after,) = on_gpu(system)
    assert after.id != before.id and after.numerics != before.numerics and worker.poll() is None
    told = scrape(after)
    assert sampled(told, "blockrelay_worker_device_changes_total") == 1
    assert sampled(told, "blockrelay_worker_device_losses_total", reason="unknown_twice") == 1
    assert f'numerics="{after.numerics}"' in told
    log = system.folder / "worker-2.log"
    (changed,) = entries(log, "DEVICE_CHANGED")
    assert changed["data"] == {"before": "cpu:0", "now": "cpu:1", "reason": "unknown_twice"}
    ready = [entry["data"]["device"] for entry in entries(log, "NODE_READY")]
    assert ready == ["cpu:0", "cpu:1"]
    run(system, make_jobs(2, seed=6, vocab=500, tokens=20))


def test_a_device_without_another_one_is_waited_for_and_cpus_serve(start_system: StartSystem, tmp_path: Path) -> None:
    python = misbehaving_python(tmp_path, FAILS_ON="cpu:0", FAIL_TEXT="out of memory")
    system = start_system(stages=2)
    worker = system.start_worker(device="gpu", gpu="cpu:0", gpu_fallbacks="", gpu_python=python)

    def waits() -> bool:
        return any(lost.losses > 1 for lost in read_lost_devices(system.client, system.keys))

    wait_until(waits, "it was tried again, and is waited for")
    (lost,) = read_lost_devices(system.client, system.keys)
    assert (lost.device, lost.reason) == ("cpu:0", "out_of_memory")
    assert run(system, make_jobs(4, seed=5, vocab=500)) == 0
    assert worker.poll() is None and not on_gpu(system)

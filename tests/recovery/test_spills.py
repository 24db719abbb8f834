"""A GPU that is full shares its queue with a CPU that ends requests sooner, and the answers are those of either alone.

The GPU computes by the kernels of CPUs, under the class gpu, so that every token can be compared.
"""

from blockrelay.protocol.plan import Device
from tests.support.systems.system import (
    Job,
    StartSystem,
    System,
    assert_nothing_is_held,
    golden_tokens,
    make_jobs,
)
from tests.support.waiting import wait_until


def measured(system: System, device: Device, job: Job) -> None:
    """The worker of this kind has computed a request alone, and says what its steps took."""
    system.accept(job)
    system.wait_all([job])
    wait_until(lambda: any(one.block_times for one in system.infos() if one.device == device), "it has measured itself")


def on_gpus(system: System, job: Job) -> bool:
    """Whether GPUs computed all of an answer; CPUs computed all of it otherwise."""
    _, end = system.log(job.request_id)
    assert end is not None and end.executed is not None and 0 in end.executed and not end.fallbacks
    return end.executed[0] > 0


def test_a_full_gpu_and_a_cpu_serve_one_queue(start_system: StartSystem) -> None:
    system = start_system(stages=1)
    first, second, *jobs = make_jobs(12, seed=8, vocab=500, longest=20, tokens=60)
    measured(system, "cpu", first)
    system.start_playing_gpu(max_requests="1", inject_speed="0.2")
    system.wait_ready(2)
    measured(system, "gpu", second)
    assert on_gpus(system, second) and not on_gpus(system, first), "where a GPU is idle it computes"
    *spilling, denying = jobs
    for job in spilling:
        system.accept(job)
    system.accept(denying, fallback="deny")
    system.wait_all(jobs)
    there = [on_gpus(system, job) for job in spilling]
    assert True in there and False in there, there
    assert on_gpus(system, denying), "its client wants no CPU"
    assert system.results(jobs) == golden_tokens(system.block_folder, jobs)
    assert_nothing_is_held(system)

"""Workers of ONNX blocks that are served as they are die in the middle of requests: nothing is lost, nothing comes
twice."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.models.onnx_blocks_served import described
from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks
from tests.support.systems.device_processes import child_of, children_of
from tests.support.systems.system import Job, StartSystem, System, assert_nothing_is_held, make_jobs, start_all
from tests.support.waiting import wait_until

MODEL = ReferenceModel(layers=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnx")
    return described(write_reference_blocks(folder / "blocks", MODEL), folder / "cache")


def jobs_of(tokens: int = 150) -> list[Job]:
    return make_jobs(8, seed=5, vocab=MODEL.vocabulary, tokens=tokens)


def assert_finished(system: System, jobs: list[Job], seen: dict[str, list[int]]) -> None:
    system.wait_all(jobs)
    for job in jobs:
        tokens, end = system.log(job.request)
        assert end is not None and end.reason == "length" and len(tokens) == job.params.max_tokens
        assert tokens[: len(seen[job.request])] == seen[job.request], "what was shown stays"
        assert not end.fallbacks, "no GPU had a part"
    assert_nothing_is_held(system)


def test_a_killed_process_of_onnx_runtime_costs_no_token(start_system: StartSystem, model: Path) -> None:
    """More often than a GPU may be lost before it is in quarantine: the CPU is not to blame."""
    system = start_system(model=model)
    system.wait_ready(1)
    jobs, (worker,) = jobs_of(), system.workers
    start_all(system, jobs)
    seen: dict[str, list[int]] = {}
    for _ in range(4):
        wait_until(lambda: bool(children_of(worker.pid)), "the process is there")
        seen = {job.request: system.log(job.request)[0] for job in jobs}
        child = child_of(worker.pid)
        os.kill(child, signal.SIGKILL)
        wait_until(lambda gone=child: gone not in children_of(worker.pid), "it is gone")
        system.wait_ready(1)
    assert_finished(system, jobs, seen)
    assert worker.poll() is None, "the worker has outlived its process"


def test_a_killed_worker_costs_no_token(start_system: StartSystem, model: Path) -> None:
    system = start_system(model=model)
    system.wait_ready(1)
    jobs, (worker,) = jobs_of(), system.workers
    start_all(system, jobs)
    seen = {job.request: system.log(job.request)[0] for job in jobs}
    worker.kill()
    system.start_worker()
    assert_finished(system, jobs, seen)


def test_a_gpu_that_dies_hands_over_to_the_cpu(start_system: StartSystem, model: Path) -> None:
    """Both run the files as they are; the pages go along."""
    system = start_system(model=model)
    system.start_worker(device="gpu", gpu="cpu")
    system.wait_ready(2)
    jobs, worker = jobs_of(), system.workers[-1]
    start_all(system, jobs)
    seen = {job.request: system.log(job.request)[0] for job in jobs}
    os.kill(child_of(worker.pid), signal.SIGKILL)
    wait_until(lambda: system.reruns().get("gpu_error", 0) > 0, "its requests are handed over")
    system.wait_all(jobs)
    moved = 0
    for job in jobs:
        tokens, end = system.log(job.request)
        assert end is not None and end.reason == "length" and len(tokens) == job.params.max_tokens
        assert tokens[: len(seen[job.request])] == seen[job.request], "what was shown stays"
        moved += len(end.fallbacks)
        assert all((event.source, event.target, event.success) == ("GPU", "CPU", True) for event in end.fallbacks)
    assert moved, "none was on the GPU"
    assert_nothing_is_held(system)

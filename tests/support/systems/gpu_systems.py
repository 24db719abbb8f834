"""Systems of two stages with a GPU beside their CPUs, and what tests ask of them.

The device is ONNX Runtime's own CPU provider, under the class gpu: what is tested is what becomes of it.
"""

from pathlib import Path

from blockrelay.protocol.messages import EndEntry
from blockrelay.protocol.plan import WorkerInfo, parse_split
from blockrelay.redis.registry import read_plan
from tests.support.scraping import sampled
from tests.support.systems.system import (
    Job,
    StartSystem,
    System,
    assert_nothing_is_held,
    make_jobs,
    scrape,
)
from tests.support.waiting import wait_until


def jobs_of(system: System) -> list[Job]:
    return make_jobs(8, seed=5, vocab=500, tokens=200)


def with_gpu(
    start_system: StartSystem,
    model: Path | None = None,
    scheduler_env: dict[str, str] | None = None,
    gpu_stages: int = 1,
    gpu: str = "cpu",
    **settings: str,
) -> System:
    """Two CPU workers, one for each stage, and beside them a process of GPU workers, whose stages the plan gives to
    them."""
    chosen = {"model": model} if model else {}
    system = start_system(stages=2, worker=settings, scheduler_env=scheduler_env, **chosen)
    system.start_worker(device="gpu", gpu=gpu, gpu_stages=str(gpu_stages), **settings)
    system.wait_ready(2 + gpu_stages)

    wait_until(lambda: stages_shown(system) == gpu_stages, "the plan has the GPU stages")
    return system


def stages_shown(system: System) -> int:
    """How many stages the plan says that GPUs compute."""
    plan = read_plan(system.client, system.keys, system.model_key)
    assert plan is not None
    return sum(plan.blocks[f"block_{stage.first}"] == "GPU" for stage in parse_split(plan.split))


def on_gpu(system: System) -> list[WorkerInfo]:
    return [one for one in system.infos() if one.device == "gpu" and one.ready]


def begun(system: System, jobs: list[Job], least: int = 1) -> dict[str, list[int]]:
    """All run, and none has ended: what their clients have seen so far, at least so many tokens each."""
    system.accept_all(jobs)
    wait_until(lambda: all(len(system.log(job.request_id)[0]) >= least for job in jobs), "every request has its tokens")
    return {job.request_id: system.log(job.request_id)[0] for job in jobs}


def end_of(system: System, job: Job) -> EndEntry:
    _, end = system.log(job.request_id)
    assert end is not None
    return end


def assert_went_on(
    system: System,
    jobs: list[Job],
    seen: dict[str, list[int]],
    why: tuple[str, str] = ("gpu_device_lost", "INTERNAL"),
    stages: int = 1,
) -> None:
    """Every request has all its tokens, the shown ones first, and says which of its `stages` went to a CPU and why."""
    system.wait_all(jobs)
    moved = 0
    for job in jobs:
        tokens, end = system.log(job.request_id)
        assert end is not None and end.reason == "length" and len(tokens) == job.params.max_tokens
        shown = seen.get(job.request_id, [])
        assert tokens[: len(shown)] == shown, "what was shown stays"
        assert len(end.fallbacks) in (0, stages)
        for event in end.fallbacks:
            moved += 1
            assert event.block_id.startswith("block_") and (event.source, event.target) == ("GPU", "CPU")
            assert (event.reason, event.error_code, event.success) == (*why, True)
            assert event.position is not None and event.position >= len(seen.get(job.request_id, []))
        if end.fallbacks:  # no token was guessed, so each is a step
            on_gpus = sum(len(event.blocks) * (event.position or 0) for event in end.fallbacks)
            assert end.executed == (on_gpus, system.block_folder.model.blocks * len(tokens) - on_gpus)
    assert moved, "none was on the GPU"
    assert_nothing_is_held(system)


def has_ended(pid: int) -> bool:
    """Also where nobody has asked what became of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def device_gauge(system: System, name: str) -> float:
    """Of all workers of the device."""
    return sum(sampled(scrape(info), f"blockrelay_worker_device_{name}") for info in on_gpu(system))


def device_counter(system: System, name: str, **labels: str) -> float:
    """Of the workers that have a device, while they are registered."""
    found = [scrape(info) for info in system.infos() if info.device == "gpu"]
    return sum(sampled(text, f"blockrelay_worker_{name}_total", **labels) for text in found)

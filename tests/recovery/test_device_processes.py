"""The process of a device dies, hangs and fails in the middle of requests: their stage goes on at a CPU.

The device is ONNX Runtime's own CPU provider, under the class gpu: what is tested is what becomes of it.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from blockrelay.protocol.messages import EndEntry
from blockrelay.protocol.plan import WorkerInfo, parse_split
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.redis.registry import read_lost_devices, read_plan
from blockrelay.settings import BUNDLED_MODEL
from tests.support.cell import read_timeline
from tests.support.models.tiny_model import write_tiny_model
from tests.support.scraping import sampled
from tests.support.systems.device_processes import child_of, children_of
from tests.support.systems.system import (
    Job,
    StartSystem,
    System,
    assert_nothing_is_held,
    golden_tokens,
    make_jobs,
    scrape,
)
from tests.support.waiting import wait_until
from tests.support.worker.misbehaving_python import misbehaving_python


def jobs_of(system: System) -> list[Job]:
    return make_jobs(8, seed=5, vocab=500, tokens=200)


def with_gpu(
    start_system: StartSystem,
    model: Path | None = None,
    scheduler_env: dict[str, str] | None = None,
    gpu_stages: int = 1,
    **settings: str,
) -> System:
    """Two CPU workers, one for each stage, and beside them a process of GPU workers, whose stages the plan gives to
    them."""
    chosen = {"model": model} if model else {}
    system = start_system(stages=2, worker=settings, scheduler_env=scheduler_env, **chosen)
    system.start_worker(device="gpu", gpu="cpu", gpu_stages=str(gpu_stages), **settings)
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
    for job in jobs:
        system.accept(job)
    wait_until(lambda: all(len(system.log(job.request)[0]) >= least for job in jobs), "every request has its tokens")
    return {job.request: system.log(job.request)[0] for job in jobs}


def end_of(system: System, job: Job) -> EndEntry:
    _, end = system.log(job.request)
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
        tokens, end = system.log(job.request)
        assert end is not None and end.reason == "length" and len(tokens) == job.params.max_tokens
        shown = seen.get(job.request, [])
        assert tokens[: len(shown)] == shown, "what was shown stays"
        assert len(end.fallbacks) in (0, stages)
        for event in end.fallbacks:
            moved += 1
            assert event.block_id.startswith("block_") and (event.source, event.target) == ("GPU", "CPU")
            assert (event.reason, event.error_code, event.success) == (*why, True)
            assert event.position is not None and event.position >= len(seen.get(job.request, []))
        if end.fallbacks:  # no token was guessed, so each is a step
            on_gpus = sum(len(event.blocks) * (event.position or 0) for event in end.fallbacks)
            assert end.executed == (on_gpus, system.block_folder.model.blocks * len(tokens) - on_gpus)
    assert moved, "none was on the GPU"
    assert_nothing_is_held(system)


@pytest.mark.parametrize("gpu_stages", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_device_that_dies_or_hangs_costs_no_token_and_comes_back(
    start_system: StartSystem, number: signal.Signals, gpu_stages: int
) -> None:
    """With all its stages at once, however many they are."""
    system = with_gpu(start_system, session_timeout_s="2", gpu_stages=gpu_stages)
    worker = system.workers[-1]
    jobs, child, former = jobs_of(system), child_of(worker.pid), {one.id for one in on_gpu(system)}
    seen = begun(system, jobs)
    os.kill(child, number)
    began = time.monotonic()
    wait_until(lambda: system.reruns().get("gpu_error", 0) > 0, "its requests are handed over")
    if number == signal.SIGKILL:
        assert time.monotonic() - began < 1, "nobody waits for a heartbeat"
    wait_until(lambda: former.isdisjoint(one.id for one in system.infos()), "all its workers have left")
    why = ("gpu_timeout", "TIMEOUT") if number == signal.SIGSTOP else ("gpu_device_lost", "INTERNAL")
    assert_went_on(system, jobs, seen, why, gpu_stages)
    assert worker.poll() is None, "the worker has outlived its device"
    wait_until(lambda: len(on_gpu(system)) == gpu_stages or stages_shown(system) == 0, "while it loads it is not shown")
    system.wait_ready(2 + gpu_stages)
    assert child_of(worker.pid) != child, "one new process, for all of them"
    assert device_counter(system, "device_renewals", reason="lost") == 1
    again = make_jobs(2, seed=6, vocab=500, tokens=20)
    begun(system, again)
    system.wait_all(again)
    wait_until(lambda: stages_shown(system) == gpu_stages, "and once it is ready it is shown")


def test_workers_of_a_device_see_its_end_though_none_has_anything_to_do(start_system: StartSystem) -> None:
    system = with_gpu(start_system, gpu_stages=2)
    former = {one.id for one in on_gpu(system)}
    os.kill(child_of(system.workers[-1].pid), signal.SIGKILL)
    wait_until(
        lambda: former.isdisjoint(one.id for one in system.infos()), "both have left the registry", timeout_s=1.0
    )
    system.wait_ready(4)


def test_stages_of_a_device_end_together_when_they_are_told_to(start_system: StartSystem) -> None:
    system = with_gpu(start_system, gpu_stages=2)
    worker, jobs = system.workers[-1], jobs_of(system)
    seen = begun(system, jobs)
    child = child_of(worker.pid)
    worker.terminate()
    assert worker.wait(30) == 0
    assert not Path(f"/proc/{child}").exists() or has_ended(child)
    system.wait_all(jobs)
    for job in jobs:
        tokens, end = system.log(job.request)
        assert end is not None and end.reason == "length" and not end.fallbacks, "a drain is no failure"
        assert tokens[: len(seen[job.request])] == seen[job.request] and len(tokens) == job.params.max_tokens


def test_a_stand_in_goes_on_from_the_pages_that_have_left_the_device(
    start_system: StartSystem, shared_folder: Path
) -> None:
    """Of 600 tokens of context no more than 64 rows are computed again, and with `recompute` all."""
    system = with_gpu(start_system, BUNDLED_MODEL, page_store_folder=str(shared_folder))
    rng = np.random.default_rng(3)
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    jobs = [
        Job(request=f"req-{at}", prompt=tuple(int(token) for token in rng.integers(3, 500, 600)), params=params)
        for at in range(8)
    ]
    told = jobs[0].request
    system.accept(jobs[0], fallback="recompute")
    seen = begun(system, jobs[1:], least=20)
    os.kill(child_of(system.workers[-1].pid), signal.SIGKILL)
    assert_went_on(system, jobs, seen)
    rows = {job.request: [event.rows_recomputed for event in end_of(system, job).fallbacks] for job in jobs}
    for request, (count,) in rows.items():
        assert count is not None
        assert count > 600 if request == told else 0 < count <= 64, rows


@pytest.mark.parametrize(
    ("stage_devices", "step"), [("gpu,cpu", "30"), ("cpu,gpu", "30"), ("gpu,cpu", "2"), ("cpu,gpu", "2")]
)
def test_a_request_that_finds_no_room_on_a_device_goes_on_where_it_was(
    start_system: StartSystem, shared_folder: Path, tmp_path: Path, stage_devices: str, step: str
) -> None:
    """No row is computed again: the pages leave up to the last row, and the device serves on."""
    python = misbehaving_python(tmp_path, FAIL_AT=step, FAIL_TEXT="Out of memory")
    devices = {"BLOCKRELAY_STAGE_DEVICES": stage_devices}
    system = with_gpu(start_system, None, devices, page_store_folder=str(shared_folder), gpu_python=python)
    (job, *_) = jobs_of(system)
    child = child_of(system.workers[-1].pid)
    system.accept(job)
    assert_went_on(system, [job], {}, ("gpu_memory_error", "OOM"))
    assert [event.rows_recomputed for event in end_of(system, job).fallbacks] == [0]
    assert device_counter(system, "device_losses") == 0 and child_of(system.workers[-1].pid) == child


def test_a_request_that_denies_cpus_waits_for_the_device(start_system: StartSystem) -> None:
    system = with_gpu(start_system)
    jobs = jobs_of(system)
    denying = jobs[0]
    system.accept(denying, fallback="deny")
    seen = begun(system, jobs[1:])
    os.kill(child_of(system.workers[-1].pid), signal.SIGKILL)
    system.wait_all([denying])
    assert_went_on(system, jobs[1:], seen)
    events = [event["event"] for event in read_timeline(system.client, system.keys, denying.request)]
    end = end_of(system, denying)
    assert "fallback_denied" in events and end.reason == "length" and not end.fallbacks


def test_a_request_that_denies_cpus_ends_when_no_device_comes(start_system: StartSystem) -> None:
    system = with_gpu(start_system, scheduler_env={"BLOCKRELAY_FALLBACK_WAIT_S": "1"})
    (denying,) = make_jobs(1, seed=5, vocab=500, tokens=400)
    system.accept(denying, fallback="deny")
    wait_until(lambda: system.log(denying.request)[0], "it is under way")
    worker = system.workers[-1]
    worker.kill()
    worker.wait()
    system.wait_all([denying])
    end = end_of(system, denying)
    assert (end.reason, end.meta["code"]) == ("error", "fallback_denied") and "FALLBACK_WAIT_S" in end.meta["error"]
    assert_nothing_is_held(system)


@pytest.mark.parametrize(("gpu_stages", "enough"), [(1, 10**6), (2, 15 * 10**5)])
def test_a_budget_that_is_too_small_is_refused_before_anything_is_loaded(
    start_system: StartSystem, gpu_stages: int, enough: int
) -> None:
    """And one that is not decides about the pages, of which each stage has as many."""
    system = start_system(stages=2)
    chosen = {"device": "gpu", "gpu": "cpu", "gpu_stages": str(gpu_stages)}
    worker = system.start_worker(**chosen, gpu_memory="1000")
    assert worker.wait(30) == 2
    said = (system.folder / f"worker-{len(system.workers) - 1}.log").read_text().splitlines()[-1]
    assert said.startswith("worker: block_") and " on cpu, where they may use 1,000" in said
    assert ("together with other stages there" in said) == (gpu_stages == 2)
    system.start_worker(**chosen, gpu_memory=str(enough))
    system.wait_ready(2 + gpu_stages)
    (pages,) = {one.pages for one in on_gpu(system)}
    assert 8 <= pages < min(one.pages for one in system.infos() if one.device == "cpu")
    tables = 4 * 512 * 16  # of the rotation: each stage tells of them, and they are there once
    used = device_gauge(system, "weight_bytes") + device_gauge(system, "pool_bytes") - (gpu_stages - 1) * tables
    assert 0.9 * enough < used <= enough, "the budget is for all, and for canaries too"


@pytest.mark.parametrize("gpu_stages", [1, 2])
def test_a_device_in_quarantine_is_told_and_tried_when_somebody_asks(
    start_system: StartSystem, gpu_stages: int
) -> None:
    """A device is lost once, however many stages it has."""
    system = with_gpu(start_system, gpu_stages=gpu_stages)
    worker = system.workers[-1]
    url = ["--redis", system.control.url]
    command, environment = [sys.executable, "-P", "-m"], {**os.environ, "BLOCKRELAY_CELL": system.cell}

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([*command, *arguments, *url], capture_output=True, text=True, env=environment)

    def lose() -> int:
        former = child_of(worker.pid)
        os.kill(former, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{former}").exists(), "the worker has seen that, though it asked nothing")
        return former

    def comes_back(former: int) -> None:
        wait_until(lambda: any(child != former for child in children_of(worker.pid)), "it has a new process")
        system.wait_ready(2 + gpu_stages)

    for _ in range(2):
        comes_back(lose())
    infos = on_gpu(system)  # their addresses stay when they are registered no more

    def told_by_all(name: str, **labels: str) -> float:
        return sum(sampled(scrape(info), f"blockrelay_worker_device_{name}", **labels) for info in infos)

    former = lose()
    wait_until(lambda: read_lost_devices(system.client, system.keys), "its worker waits")
    wait_until(lambda: told_by_all("losses_total", reason="process_ended") == 3 * gpu_stages, "each has seen it")
    assert told_by_all("quarantined") == 1
    assert told_by_all("quarantines_total") == 1
    assert told_by_all("renewals_total", reason="lost") == 2
    wait_until(lambda: told_by_all("weight_bytes") == 0, "nothing is there")
    (lost,) = read_lost_devices(system.client, system.keys)
    assert (lost.device, lost.reason, lost.losses, lost.quarantine) == ("cpu", "process_ended", 3, True)
    told = run("blockrelay_launcher", "status").stdout
    assert f"cpu of {lost.worker} was lost 3 times, last for process_ended: in quarantine" in told, told
    asked = run("blockrelay_worker.offline.devices", "retry", "cpu")
    assert (asked.returncode, asked.stdout) == (0, f"{lost.worker} tries cpu now\n")
    comes_back(former)
    refused = run("blockrelay_worker.offline.devices", "retry", "cpu")
    assert refused.returncode == 2 and "waits for cpu; lost devices: none" in refused.stderr, refused


@pytest.mark.parametrize("gpu_stages", [1, 2])
def test_a_worker_that_is_killed_takes_its_device_along(start_system: StartSystem, gpu_stages: int) -> None:
    system = with_gpu(start_system, gpu_stages=gpu_stages)
    worker = system.workers[-1]
    child = child_of(worker.pid)
    worker.kill()
    worker.wait()
    wait_until(lambda: has_ended(child), "the process of the device has ended", timeout_s=1)


def has_ended(pid: int) -> bool:
    """Also where nobody has asked what became of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("hangs_at", ["open", "load"])
def test_a_worker_whose_device_is_not_there_yet_ends_at_once(
    start_system: StartSystem, tmp_path: Path, hangs_at: str
) -> None:
    """Shaders may take a minute: nobody waits for them who wants it to end."""
    reached = tmp_path / "reached"
    python = misbehaving_python(tmp_path, HANGS_AT=hangs_at, HANGS_FILE=str(reached))
    system = start_system(stages=2)
    worker = system.start_worker(device="gpu", gpu="cpu", gpu_python=python, drain_s="60")
    wait_until(reached.exists, "its device does what it never ends")
    child = child_of(worker.pid)
    worker.terminate()
    assert worker.wait(10) == 0
    wait_until(lambda: not Path(f"/proc/{child}").exists(), "nor is its device there any more")


def test_a_device_that_computes_wrong_numbers_hands_over_and_comes_back(
    start_system: StartSystem, tmp_path: Path
) -> None:
    """Nobody would notice but for its canaries."""
    python = misbehaving_python(tmp_path, WRONG_FROM="60")
    system = with_gpu(start_system, canary_s="0.05", gpu_python=python)
    jobs, child = jobs_of(system), child_of(system.workers[-1].pid)
    seen = begun(system, jobs)
    assert_went_on(system, jobs, seen, ("gpu_wrong_numbers", "INTERNAL"))
    wait_until(lambda: device_counter(system, "canaries", result="wrong") == 1, "its canary has told")
    system.wait_ready(3)
    assert child_of(system.workers[-1].pid) != child


@pytest.mark.parametrize("gpu_stages", [1, 2])
def test_a_device_that_gives_nan_goes_on_and_a_cpu_computes_what_it_spoiled(
    start_system: StartSystem, tmp_path: Path, gpu_stages: int
) -> None:
    """One request at a time is concerned; its tokens are those of a run that nobody disturbed."""
    python = misbehaving_python(tmp_path, NAN_AT="12,25")
    model = write_tiny_model(tmp_path, "fp32")
    system = with_gpu(start_system, model, gpu_stages=gpu_stages, gpu_python=python)
    child = child_of(system.workers[-1].pid)
    jobs = make_jobs(4, seed=5, vocab=500, tokens=40)
    golden = golden_tokens(system.block_folder, jobs)
    for job in jobs:
        system.accept(job)
    system.wait_all(jobs)
    assert system.results(jobs) == golden
    events = [event for job in jobs for event in end_of(system, job).fallbacks]
    assert 1 <= len(events) <= 2, "one for each step with NaN: its neighbours have not moved"
    for event in events:
        assert (event.reason, event.error_code, event.success) == ("gpu_wrong_numbers", "INTERNAL", True)
    wait_until(lambda: device_counter(system, "canaries", result="right") >= 1, "it answers its canary at once")
    assert device_counter(system, "device_losses") == 0 and child_of(system.workers[-1].pid) == child
    assert_nothing_is_held(system)


@pytest.mark.parametrize("gpu_stages", [1, 2])
def test_a_device_that_gets_slower_is_given_a_new_process_and_no_request_notices(
    start_system: StartSystem, tmp_path: Path, gpu_stages: int
) -> None:
    """All its stages leave for it."""
    python = misbehaving_python(tmp_path, SLOW_FROM=str(60 * gpu_stages))
    system = with_gpu(start_system, gpu_python=python, gpu_stages=gpu_stages)
    child, jobs = child_of(system.workers[-1].pid), list[Job]()
    params = SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True)
    while not device_counter(system, "device_renewals", reason="slow"):
        jobs.append(Job(request=f"req-{len(jobs)}", prompt=tuple(range(3, 383)), params=params))
        assert len(jobs) < 20, "nothing was done about it"
        system.accept(jobs[-1])
        system.wait_all(jobs)
        system.wait_ready(2 + gpu_stages)  # while it has no process there are CPUs alone, and they are quick
    assert child_of(system.workers[-1].pid) != child
    assert device_counter(system, "device_renewals", reason="slow") == 1
    assert 1 <= device_counter(system, "device_cleanups") <= gpu_stages
    assert device_counter(system, "device_losses") == 0
    for job in jobs:
        tokens, end = system.log(job.request)
        assert end is not None and len(tokens) == 90 and not end.fallbacks
    assert not system.client.exists(system.keys.renewal(system.model_key)), "another device may be next"


def device_gauge(system: System, name: str) -> float:
    """Of all workers of the device."""
    return sum(sampled(scrape(info), f"blockrelay_worker_device_{name}") for info in on_gpu(system))


def device_counter(system: System, name: str, **labels: str) -> float:
    """Of the workers that have a device, while they are registered."""
    found = [scrape(info) for info in system.infos() if info.device == "gpu"]
    return sum(sampled(text, f"blockrelay_worker_{name}_total", **labels) for text in found)

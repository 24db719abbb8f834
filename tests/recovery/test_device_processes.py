"""The process of a device dies and hangs in the middle of requests: their stage goes on at a CPU."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.redis.registry import read_lost_devices
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_launcher.drill.system import children_of
from tests.support.cell import read_timeline
from tests.support.scraping import sampled
from tests.support.systems.device_processes import child_of
from tests.support.systems.gpu_systems import (
    assert_went_on,
    begun,
    device_counter,
    device_gauge,
    end_of,
    has_ended,
    jobs_of,
    on_gpu,
    stages_shown,
    with_gpu,
)
from tests.support.systems.system import (
    Job,
    StartSystem,
    assert_nothing_is_held,
    make_jobs,
    scrape,
)
from tests.support.waiting import wait_until
from tests.support.worker.misbehaving_python import misbehaving_python


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
        tokens, end = system.log(job.request_id)
        assert end is not None and end.reason == "length" and not end.fallbacks, "a drain is no failure"
        assert tokens[: len(seen[job.request_id])] == seen[job.request_id] and len(tokens) == job.params.max_tokens


def test_a_stand_in_goes_on_from_the_pages_that_have_left_the_device(
    start_system: StartSystem, shared_folder: Path
) -> None:
    """Of 600 tokens of context no more than 64 rows are computed again, and with `recompute` all."""
    system = with_gpu(start_system, BUNDLED_MODEL, page_store_folder=str(shared_folder))
    rng = np.random.default_rng(3)
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    jobs = [
        Job(request_id=f"req-{at}", prompt=tuple(int(token) for token in rng.integers(3, 500, 600)), params=params)
        for at in range(8)
    ]
    told = jobs[0].request_id
    system.accept(jobs[0], fallback="recompute")
    seen = begun(system, jobs[1:], least=20)
    os.kill(child_of(system.workers[-1].pid), signal.SIGKILL)
    assert_went_on(system, jobs, seen)
    rows = {job.request_id: [event.rows_recomputed for event in end_of(system, job).fallbacks] for job in jobs}
    for request_id, (count,) in rows.items():
        assert count is not None
        assert count > 600 if request_id == told else 0 < count <= 64, rows


def test_a_request_that_denies_cpus_waits_for_the_device(start_system: StartSystem) -> None:
    system = with_gpu(start_system)
    jobs = jobs_of(system)
    denying = jobs[0]
    system.accept(denying, fallback="deny")
    seen = begun(system, jobs[1:])
    os.kill(child_of(system.workers[-1].pid), signal.SIGKILL)
    system.wait_all([denying])
    assert_went_on(system, jobs[1:], seen)
    events = [event["event"] for event in read_timeline(system.client, system.keys, denying.request_id)]
    end = end_of(system, denying)
    assert "fallback_denied" in events and end.reason == "length" and not end.fallbacks


def test_a_request_that_denies_cpus_ends_when_no_device_comes(start_system: StartSystem) -> None:
    system = with_gpu(start_system, scheduler_env={"BLOCKRELAY_FALLBACK_WAIT_S": "1"})
    (denying,) = make_jobs(1, seed=5, vocab=500, tokens=400)
    system.accept(denying, fallback="deny")
    wait_until(lambda: system.log(denying.request_id)[0], "it is under way")
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
    assert said.startswith("blockrelay: block_") and " on cpu, where they may use 1,000" in said
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

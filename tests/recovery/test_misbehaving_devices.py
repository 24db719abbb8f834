"""A device fails, has no room, computes wrong numbers or gets slower amid requests, and its process lives."""

from pathlib import Path

import pytest

from blockrelay.protocol.sampling_params import SamplingParams
from tests.support.models.tiny_model import write_tiny_model
from tests.support.systems.device_processes import child_of
from tests.support.systems.gpu_systems import assert_went_on, begun, device_counter, end_of, jobs_of, with_gpu
from tests.support.systems.system import Job, StartSystem, assert_nothing_is_held, make_jobs, serve
from tests.support.waiting import wait_until
from tests.support.worker.misbehaving_python import misbehaving_python


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
    serve(system, jobs)
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
        jobs.append(Job(request_id=f"req-{len(jobs)}", prompt=tuple(range(3, 383)), params=params))
        assert len(jobs) < 20, "nothing was done about it"
        system.accept(jobs[-1])
        system.wait_all(jobs)
        system.wait_ready(2 + gpu_stages)  # while it has no process there are CPUs alone, and they are quick
    assert child_of(system.workers[-1].pid) != child
    assert device_counter(system, "device_renewals", reason="slow") == 1
    assert 1 <= device_counter(system, "device_cleanups") <= gpu_stages
    assert device_counter(system, "device_losses") == 0
    for job in jobs:
        tokens, end = system.log(job.request_id)
        assert end is not None and len(tokens) == 90 and not end.fallbacks
    assert not system.client.exists(system.keys.renewal(system.model_key)), "another device may be next"

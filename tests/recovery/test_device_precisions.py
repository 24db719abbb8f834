"""`blockrelay precision set` changes workers on GPUs too: each leaves its stage, and loads it from the other folder.

The device is ONNX Runtime's own CPU provider, under the class gpu.
"""

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.plan import Stage, WorkerInfo
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.redis.client import connect
from blockrelay.redis.plan_history import read_history
from blockrelay.redis.registry import read_workers
from blockrelay.up_file import read_running
from blockrelay_converter.convert import convert
from blockrelay_worker.execution.onnx.loading import OnnxExecutors
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider
from blockrelay_worker.execution.process.executors import Gpu
from blockrelay_worker.offline.pipeline import Pipeline, generate
from tests.support.systems.device_processes import child_of
from tests.support.systems.gpu_systems import begun, end_of, jobs_of, on_gpu, with_gpu
from tests.support.systems.system import Job, StartSystem, System, assert_nothing_is_held, make_jobs
from tests.support.systems.up_process import UpProcess, run_command, running_up
from tests.support.waiting import wait_until
from tests.support.worker.misbehaving_python import COMMANDED, misbehaving_python

pytestmark = pytest.mark.timeout(300)

REQUESTS, TOKENS = 4, 60
#: Tokens of each request, by the numerics id that alone computed them.
Alone = Mapping[str, list[list[int]]]


def prompt_of(seed: int) -> list[int]:
    return [1, 5 + seed, 9]


def ask(up: UpProcess, seed: int) -> dict[str, Any]:
    return up.complete(prompt=prompt_of(seed), max_tokens=TOKENS, temperature=1, seed=seed)


def tokens_of(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


def numerics_of(answer: dict[str, Any]) -> str:
    return answer["system_fingerprint"]


def precision_of(answer: dict[str, Any]) -> str:
    return numerics_of(answer).partition("-")[0]


def ask_the_gpu(up: UpProcess, seed: int, precision: str) -> dict[str, Any]:
    """The answer of a GPU, as soon as the plan says that it takes requests."""
    answers: list[dict[str, Any]] = []

    def is_of_the_gpu() -> bool:
        answers.append(ask(up, seed))
        return numerics_of(answers[-1]).startswith(f"{precision}-cpu-")

    wait_until(is_of_the_gpu, "the GPU takes requests", timeout_s=60)
    return answers[-1]


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny model in three precisions."""
    found = {"w8a8": tiny_model}
    for precision in ("w4a8", "fp32"):
        found[precision] = tmp_path_factory.mktemp(precision) / "model"
        checkpoint = tiny_model.parent / "checkpoint"
        convert(checkpoint, found[precision], precision=precision, report=lambda *_: None, name="tiny")
    return found


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> Alone:
    """What undisturbed GPUs and CPUs answer."""
    found: dict[str, list[list[int]]] = {}
    params = SamplingParams(max_tokens=TOKENS, temperature=1, ignore_eos=True)
    for precision in ("w8a8", "w4a8"):
        for gpu in (Gpu("cpu", 60.0), None):
            folder = open_block_folder(folders[precision])
            with contextlib.closing(Pipeline(folder, stages=1, threads=1, tokens=512, gpu=gpu)) as pipeline:
                found[pipeline.numerics] = [
                    generate(pipeline, prompt_of(seed), params, seed=seed, tokenizer=None).tokens
                    for seed in range(REQUESTS)
                ]
    assert len(found) == 4, found.keys()
    return found


def workers_of(up: UpProcess) -> list[WorkerInfo]:
    """The registered workers, read from Redis: that is quicker than the command, so that short states are seen."""
    assert up.data is not None
    running = read_running(up.data)
    model = open_block_folder(running.model, blocks=[]).model_key
    with connect(running.redis_url) as client:
        return read_workers(client, Keys(running.cell), model)


def on_gpus(up: UpProcess) -> list[WorkerInfo]:
    return [one for one in workers_of(up) if one.device == "gpu" and one.ready]


@contextlib.contextmanager
def with_a_gpu(folders: dict[str, Path], data: Path, *options: str) -> Iterator[UpProcess]:
    """A CPU worker and a GPU worker of the whole model, which know both folders. The GPU serves."""
    known = "--other-precision", str(folders["w4a8"])
    with running_up(folders["w8a8"], *known, "--gpu", "cpu", *options, data=data) as up:
        wait_until(lambda: on_gpus(up), "the GPU serves", timeout_s=60)
        yield up


def command(up: UpProcess, *arguments: str) -> dict[str, Any]:
    done = run_command("precision", *arguments, "--data", up.data, "--json")
    assert done.returncode == 0, done
    return json.loads(done.stdout)


def is_over(up: UpProcess, precision: str) -> bool:
    """Whether the CPU worker and the GPU worker serve `precision`."""
    served = [one.served.precision for one in workers_of(up) if one.ready and one.served]
    return served == [precision] * 2


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers compute slowly, so that requests still run while the precision changes."""
    monkeypatch.setenv("BLOCKRELAY_INJECT_SPEED", "0.06")
    monkeypatch.setenv("BLOCKRELAY_NUMERICS_WAIT_S", "1")


def test_requests_on_a_gpu_end_in_the_precision_in_which_they_began(
    folders: dict[str, Path], alone: Alone, slow: None, tmp_path: Path
) -> None:
    with with_a_gpu(folders, tmp_path) as up, ThreadPoolExecutor(32) as pool:
        before = [pool.submit(ask, up, seed) for seed in range(REQUESTS)]
        wait_until(lambda: any(one.running for one in on_gpus(up)), "the GPU has some")
        assert command(up, "set", "w4a8")["changed"]
        during: list[Future[dict[str, Any]]] = []

        def goes_on() -> bool:
            if sum(not one.done() for one in during) < REQUESTS:
                during.append(pool.submit(ask, up, len(during) % REQUESTS))
            return is_over(up, "w4a8")

        wait_until(goes_on, "all workers have changed", timeout_s=90)
        after = [pool.submit(ask, up, seed) for seed in range(REQUESTS)]
        assert {precision_of(one.result()) for one in before} == {"w8a8"}
        assert {precision_of(one.result()) for one in after} == {"w4a8"}
        for asked in (before, during, after):
            for index, one in enumerate(asked):
                assert tokens_of(one.result()) == alone[numerics_of(one.result())][index % REQUESTS]
        assert any("-cpu-" in numerics_of(one.result()) for one in before), "the GPU had some"
        shown = command(up)
        assert [one["precision"] for one in shown["precisions"] if one["in_force"]] == ["w4a8"] and not shown["pending"]
        ask_the_gpu(up, 0, "w4a8")
        done = run_command("plan", "rollback", "--data", up.data)
        assert done.returncode == 0, done
        wait_until(lambda: is_over(up, "w8a8"), "and back", timeout_s=90)
        answer = ask_the_gpu(up, 1, "w8a8")
        assert tokens_of(answer) == alone[numerics_of(answer)][1]
        up.assert_nothing_is_ownerless()


def test_a_precision_for_which_a_gpu_lacks_memory_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = open_block_folder(folders["w4a8"], blocks=[])
    memory, stage = OnnxExecutors(CpuProvider()).memory(folder), Stage(first=1, last=folder.model.blocks)
    enough = memory.weight_bytes(stage) + memory.pool_bytes(stage, 16)
    options = ("--other-precision", str(folders["fp32"]), "--gpu", "cpu", "--gpu-memory", str(enough))
    with running_up(folders["w4a8"], *options, data=tmp_path) as up:
        wait_until(lambda: on_gpus(up), "the GPU serves", timeout_s=60)
        done = run_command("precision", "set", "fp32", "--data", up.data)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
        assert "could not hold its part of fp32: cpu of " in done.stderr
        assert is_over(up, "w4a8")
        ask_the_gpu(up, 0, "w4a8")


def test_stages_that_fit_on_a_gpu_only_alone_get_a_smaller_precision(folders: dict[str, Path], tmp_path: Path) -> None:
    memory = OnnxExecutors(CpuProvider()).memory(open_block_folder(folders["w8a8"], blocks=[]))
    stages = [Stage(first=1, last=3), Stage(first=4, last=5)]
    needed = memory.weight_bytes(*stages) + sum(memory.pool_bytes(one, memory.least_pages) for one in stages)
    options = ["--other-precision", str(folders["w4a8"]), "--degrade", "--stages", "2", "--stage-devices", "gpu,gpu"]
    with running_up(folders["w8a8"], *options, "--gpu", "cpu", "--gpu-memory", str(needed - 1), data=tmp_path) as up:
        wait_until(
            lambda: [one.served.precision for one in on_gpus(up) if one.served] == ["w4a8"] * 2,
            "the GPU serves both stages in the smaller one",
            timeout_s=90,
        )
        ask_the_gpu(up, 0, "w4a8")


def set_precision(system: System, precision: str) -> None:
    done = run_command("precision", "set", precision, "--redis", system.control.url, env=environment_of(system))
    assert done.returncode == 0, done


def environment_of(system: System) -> dict[str, str]:
    return {**os.environ, "BLOCKRELAY_CELL": system.cell}


def all_serve(system: System, folder: Path, workers: int) -> bool:
    key = open_block_folder(folder, blocks=[]).model_key
    infos = system.infos()
    return len(infos) == workers and all(one.ready and one.folder == key for one in infos)


def kill_device(system: System) -> None:
    os.kill(child_of(system.workers[-1].pid), signal.SIGKILL)


def kill_worker(system: System) -> None:
    system.workers[-1].kill()
    system.workers[-1].wait()


def retires(system: System) -> bool:
    return any(one.device == "gpu" and one.retires for one in system.infos())


def loads(system: System) -> bool:
    return any(one.device == "gpu" and not one.ready and one.folder != system.model_key for one in system.infos())


@pytest.mark.parametrize("kill", [kill_device, kill_worker])
@pytest.mark.parametrize("moment", [retires, loads])
def test_a_gpu_that_dies_in_the_change_loses_nothing(
    start_system: StartSystem,
    folders: dict[str, Path],
    tmp_path: Path,
    kill: Callable[[System], None],
    moment: Callable[[System], bool],
) -> None:
    faults = tmp_path / "faults"
    faults.mkdir()
    settings = {
        "gpu_python": misbehaving_python(tmp_path, COMMANDED, FAULTS=str(faults)),
        "other_precisions": str(folders["w4a8"]),
        "inject_speed": "0.2",
    }
    system = with_gpu(start_system, None, None, 1, "cpu", **settings)
    jobs = jobs_of(system)
    seen = begun(system, jobs)
    (faults / "load").touch()
    set_precision(system, "w4a8")
    wait_until(lambda: moment(system), "the GPU is in the middle", timeout_s=60)
    kill(system)
    (faults / "load").unlink()
    if system.workers[-1].poll() is not None:
        system.start_worker(device="gpu", gpu="cpu", **settings)
    wait_until(lambda: all_serve(system, folders["w4a8"], 3), "all serve the new precision", timeout_s=90)
    system.wait_all(jobs)
    for job in jobs:
        tokens, end = system.log(job.request_id)
        assert end is not None and end.reason == "length" and len(tokens) == job.params.max_tokens
        assert tokens[: len(seen[job.request_id])] == seen[job.request_id], "what was shown stays"
        assert all((event.source, event.target) == ("GPU", "CPU") for event in end.fallbacks)
    after = make_jobs(4, seed=7, vocab=500)
    system.accept_all(after)
    system.wait_all(after)
    assert all(numerics_at_end(system, job).startswith("w4a8-") for job in after)
    assert_nothing_is_held(system)


def numerics_at_end(system: System, job: Job) -> str:
    return end_of(system, job).numerics


def test_all_stages_of_a_device_change_together(start_system: StartSystem, folders: dict[str, Path]) -> None:
    """The stages share the memory of the device, in which two folders may have no room."""
    known = str(folders["w4a8"])
    system = with_gpu(start_system, gpu_stages=2, other_precisions=known, inject_speed="0.2")
    before = {one.id for one in on_gpu(system)}
    jobs = jobs_of(system)
    system.accept_all(jobs)
    wait_until(lambda: all(system.log(job.request_id)[0] for job in jobs), "all have begun")
    set_precision(system, "w4a8")
    wait_until(lambda: all_serve(system, folders["w4a8"], 4), "all have changed", timeout_s=90)
    assert before.isdisjoint(one.id for one in on_gpu(system))
    more = make_jobs(4, seed=7, vocab=500)
    system.accept_all(more)
    system.wait_all([*jobs, *more])
    for job, precision in [*((job, "w8a8") for job in jobs), *((job, "w4a8") for job in more)]:
        tokens, end = system.log(job.request_id)
        assert end is not None and end.reason == "length" and len(tokens) == job.params.max_tokens
        assert not end.fallbacks and "+" not in end.numerics, "no other id went on with it"
        assert end.numerics.startswith(precision)
    assert_nothing_is_held(system)


def test_a_device_that_runs_out_of_memory_twice_gets_a_smaller_precision(
    start_system: StartSystem, folders: dict[str, Path], tmp_path: Path
) -> None:
    """And its CPU stand-ins with it, so that both serve one request together."""
    large = open_block_folder(folders["w8a8"], blocks=[]).model_key
    python = misbehaving_python(tmp_path, FAILS_OF=large, FAIL_TEXT="CUDA failure 2: out of memory")
    settings = {"gpu_python": python, "gpu_fallbacks": "", "other_precisions": str(folders["w4a8"]), "degrade": "on"}
    system = with_gpu(start_system, None, {"BLOCKRELAY_DEGRADE": "on"}, 1, "cpu", **settings)
    wait_until(lambda: all_serve(system, folders["w4a8"], 3), "all have changed", timeout_s=90)
    origins = [entry.origin for entry in read_history(system.client, system.keys, system.model_key)]
    assert origins == ["degraded", "settings"]
    jobs = make_jobs(4, seed=7, vocab=500)
    system.accept_all(jobs)
    system.wait_all(jobs)
    assert all(numerics_at_end(system, job).startswith("w4a8-") for job in jobs)
    assert_nothing_is_held(system)


def test_a_device_that_took_anothers_place_changes_too(
    start_system: StartSystem, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Under the numerics ids of its own."""
    python = misbehaving_python(tmp_path, RUNS_FAIL_ON="cpu:0", FAIL_FROM="30", FAIL_TEXT="moon phase")
    known = str(folders["w4a8"])
    system = with_gpu(start_system, gpu="cpu:0", gpu_fallbacks="cpu:1", gpu_python=python, other_precisions=known)
    (first,) = on_gpu(system)
    ids = {one.key: one.numerics for one in first.folders}
    jobs = jobs_of(system)
    system.accept_all(jobs)
    wait_until(lambda: any(one.numerics != first.numerics for one in on_gpu(system)), "it is on cpu:1", timeout_s=60)
    set_precision(system, "w4a8")
    wait_until(lambda: all_serve(system, folders["w4a8"], 3), "all have changed", timeout_s=90)
    (last,) = on_gpu(system)
    assert last.numerics.startswith("w4a8-cpu-") and last.numerics not in ids.values()
    system.wait_all(jobs)
    assert all(end_of(system, job).reason == "length" for job in jobs)
    assert_nothing_is_held(system)

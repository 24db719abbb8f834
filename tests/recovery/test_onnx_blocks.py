"""Workers of ONNX blocks that are served as they are die in the middle of requests: nothing is lost, nothing comes
twice."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.protocol.tensors import decode_tensor
from blockrelay.up_file import read_running
from blockrelay_launcher.drill.system import children_of, environment_of
from tests.support.json_tensors import json_tensor
from tests.support.models.imported import imported
from tests.support.models.onnx_blocks_served import described
from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks
from tests.support.scraping import sampled
from tests.support.systems.device_processes import child_of
from tests.support.systems.system import Job, StartSystem, System, assert_nothing_is_held, make_jobs, start_all
from tests.support.systems.up_process import UpProcess, run_command, running_up
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
        tokens, end = system.log(job.request_id)
        assert end is not None and end.reason == "length" and len(tokens) == job.params.max_tokens
        assert tokens[: len(seen[job.request_id])] == seen[job.request_id], "what was shown stays"
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
        seen = {job.request_id: system.log(job.request_id)[0] for job in jobs}
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
    seen = {job.request_id: system.log(job.request_id)[0] for job in jobs}
    worker.kill()
    system.start_worker()
    assert_finished(system, jobs, seen)


@pytest.fixture(scope="module")
def import_of_it(model: Path) -> Path:
    blocks = open_block_folder(model).onnx_root
    assert blocks is not None
    return imported(blocks, model.parent / "imported").folder.root


@pytest.mark.parametrize("stand_in", ["files", "imported"])
def test_a_gpu_that_dies_hands_over_to_the_cpu(
    start_system: StartSystem, model: Path, import_of_it: Path, stand_in: str
) -> None:
    """The pages go along: to the files as they are, or to what was imported from them."""
    settings = {"imported_model": str(import_of_it)} if stand_in == "imported" else {}
    system = start_system(model=model, worker=settings)
    system.start_worker(device="gpu", gpu="cpu")
    system.wait_ready(2)
    jobs, worker = jobs_of(), system.workers[-1]
    start_all(system, jobs)
    seen = {job.request_id: system.log(job.request_id)[0] for job in jobs}
    os.kill(child_of(worker.pid), signal.SIGKILL)
    wait_until(lambda: system.reruns().get("gpu_error", 0) > 0, "its requests are handed over")
    system.wait_all(jobs)
    moved = 0
    for job in jobs:
        tokens, end = system.log(job.request_id)
        assert end is not None and end.reason == "length" and len(tokens) == job.params.max_tokens
        assert tokens[: len(seen[job.request_id])] == seen[job.request_id], "what was shown stays"
        moved += len(end.fallbacks)
        assert all((event.source, event.target, event.success) == ("GPU", "CPU", True) for event in end.fallbacks)
    assert moved, "none was on the GPU"
    assert bool(children_of(system.workers[0].pid)) == (stand_in == "files"), "a process of ONNX Runtime runs files"
    assert_nothing_is_held(system)


def test_three_commands_lead_to_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`up --blocks`: a tensor step, and tokens that go on when the process of the blocks is killed."""
    monkeypatch.setenv("BLOCKRELAY_CACHE_DIR", str(tmp_path / "cache"))
    blocks = write_reference_blocks(tmp_path / "my-blocks", MODEL)
    body: dict[str, Any] = {"model": "my-blocks", "prompt": [3, 7, 11], "max_tokens": 100, "temperature": 0}
    with running_up(None, "--blocks", str(blocks), data=tmp_path / "data") as up:
        step = {"session_id": "mine", "step": 1, "input_tensors": {"input_ids": [3, 7, 11]}}
        answer = up.infer(**step)
        assert answer["outputs"]["logits"]["shape"] == [1, 1, MODEL.vocabulary], answer
        assert list(answer["execution_times"]) == [f"block_{n}" for n in range(1, MODEL.layers + 2)]
        later = {"session_id": "mine", "step": 2, "input_tensors": {"input_ids": list(range(40))}}
        assert up.infer(**later)["execution_stats"]["cached_tokens"] == 0
        last = {"session_id": "mine", "step": 3, "input_tensors": {"input_ids": [5]}}
        stats = up.infer(**last)["execution_stats"]
        assert stats["cached_tokens"] == 32, "of 43: full pages of the steps before"
        expected = up.tokens(**body)
        kv_goes_out_and_in(up)
        (worker,) = up.pid_of("blockrelay_worker")
        with ThreadPoolExecutor() as clients:
            asked = [clients.submit(up.tokens, **body) for _ in range(4)]
            os.kill(child_of(worker), signal.SIGKILL)
            assert [len(one.result()) for one in asked] == [100] * 4
        assert up.tokens(**body) == expected
        refused = httpx.post(f"{up.url}/v1/completions", json={**body, "exact": True}, timeout=60)
        assert refused.status_code == 400, refused.text


def kv_goes_out_and_in(up: UpProcess) -> None:
    """By blocks, as the files call it. Bits are not promised: rows of a step differ with their number."""
    tokens = [3 + position % 50 for position in range(20)]
    whole, taken = dict[str, Any](), dict[str, Any]()
    for blocks in ("1", f"2-{MODEL.layers + 1}"):
        body = {"input_tensors": {"input_ids": [tokens]}, "blocks": blocks}
        outputs = up.infer(**body)["outputs"]
        whole = outputs.pop("logits")
        taken |= {name.replace("present", "past_key_values"): tensor for name, tensor in outputs.items()}
    assert sorted(taken) == sorted(
        f"past_key_values.{layer}.{half}" for layer in range(MODEL.layers) for half in ("key", "value")
    )
    first = decode_tensor(taken["past_key_values.0.key"], param="kv", max_elements=1 << 20)
    given = {
        name: json_tensor(decode_tensor(tensor, param="kv", max_elements=1 << 20)[:, :, :19])
        for name, tensor in taken.items()
    }
    assert first.shape[2] == 20 and first.dtype == np.float16
    body = {"input_tensors": {"input_ids": [tokens], **given}}
    answer = up.infer(**body)
    assert answer["execution_stats"]["cached_tokens"] == 16, answer["execution_stats"]
    again, before = (
        decode_tensor(one, param="logits", max_elements=1 << 20).astype(np.float32)
        for one in (answer["outputs"]["logits"], whole)
    )
    np.testing.assert_allclose(again, before, atol=0.02 * float(np.abs(before).max()))


def test_blocks_one_by_one_give_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the worker counts the sessions that came and went."""
    monkeypatch.setenv("BLOCKRELAY_CACHE_DIR", str(tmp_path / "cache"))
    blocks = write_reference_blocks(tmp_path / "my-blocks", MODEL)
    body: dict[str, Any] = {"model": "my-blocks", "prompt": [3, 7, 11], "max_tokens": 20, "temperature": 0}
    with running_up(None, "--blocks", str(blocks)) as up:
        expected = up.tokens(**body)
    with running_up(None, "--blocks", str(blocks), "--sequential", data=tmp_path / "data") as up:
        assert up.tokens(**body) == expected
        (worker,) = up.status()["workers"]
        least = 20 * (MODEL.layers + 1)
        wait_until(lambda: counted(worker, "s_evicted") >= least - 2, "each step makes each block anew")
        assert counted(worker, "s_made") >= least and counted(worker, "_cleanups") > 0
        step = {"input_tensors": {"input_ids": [[3, 7, 11]]}}
        stats = up.infer(**step)["execution_stats"]["warm_sessions"]
        assert stats["made"] >= least and stats["jobs_ok"] >= least and stats["jobs_failed"] == 0, stats
        assert stats["evicted"] > 0 and stats["clean_ups"] > 0 and stats["load_seconds"] > 0 < stats["run_seconds"]
        shown = run_command("status", "--data", up.data)
        assert "sessions of ONNX blocks" in shown.stdout, shown.stdout


def counted(worker: dict[str, Any], what: str) -> float:
    """Of its sessions."""
    found = httpx.get(f"http://{worker['host']}:{worker['port']}/metrics").text
    return sampled(found, f"blockrelay_worker_warm_session{what}_total")


def test_the_cpu_beside_a_gpu_computes_with_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which `up --blocks --gpu` makes. Killed in the middle of an answer, the GPU's process costs no token."""
    monkeypatch.setenv("BLOCKRELAY_CACHE_DIR", str(tmp_path / "cache"))
    blocks = write_reference_blocks(tmp_path / "my-blocks", MODEL)
    body: dict[str, Any] = {"model": "my-blocks", "prompt": [3, 7, 11], "max_tokens": 1500, "temperature": 0}
    with running_up(None, "--blocks", str(blocks), "--gpu", "cpu", data=tmp_path / "data") as up:
        stand_in, gpu = sorted(
            up.pid_of("blockrelay_worker"), key=lambda pid: environment_of(pid).get("BLOCKRELAY_GPU") == "cpu"
        )
        assert "BLOCKRELAY_IMPORTED_MODEL" in environment_of(stand_in)
        assert not children_of(stand_in), "it has no process of ONNX Runtime"
        wait_until(lambda: "gpu" in ready_devices(up), "the GPU serves", timeout_s=60)
        chunks = list[dict[str, Any]]()
        asked = {**body, "stream": True, "return_token_ids": True}
        with httpx.stream("POST", f"{up.url}/v1/completions", json=asked, timeout=120) as stream:
            for line in stream.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunks.append(json.loads(line.removeprefix("data: ")))
                if len(chunks) == 5:
                    os.kill(child_of(gpu), signal.SIGKILL)
        tokens = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]
        assert len(tokens) == 1500
        told = httpx.get(f"{up.url}/v1/requests/{chunks[0]['id']}", timeout=60).json()["fallback_events"]
        assert (told[0]["from"], told[0]["to"], told[0]["success"]) == ("GPU", "CPU", True) and told[0]["position"] > 0
        refused = httpx.post(f"{up.url}/v1/completions", json={**body, "exact": True}, timeout=60)
        assert refused.status_code == 400, refused.text


def test_a_file_that_is_altered_is_named_once_and_served_again_when_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BLOCKRELAY_CACHE_DIR", str(tmp_path / "cache"))
    blocks = write_reference_blocks(tmp_path / "my-blocks", MODEL)
    body: dict[str, Any] = {"model": "my-blocks", "prompt": [3, 7, 11], "max_tokens": 8, "temperature": 0}
    file, draft = blocks / "block_2.onnx", tmp_path / "draft"
    whole = file.read_bytes()

    def replace(content: bytes) -> None:
        """In one step: workers have mapped the file, and one may just be starting."""
        draft.write_bytes(content)
        draft.replace(file)

    with running_up(None, "--blocks", str(blocks), data=tmp_path / "data") as up:
        expected = up.tokens(**body)
        replace(whole[:-1])
        (worker,) = up.pid_of("blockrelay_worker")
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: read_running(tmp_path / "data").refused, "it refuses", timeout_s=60)
        told = run_command("status", "--data", up.data)
        assert "worker-1 cannot serve: " in told.stdout and "block_2.onnx: altered" in told.stdout, told.stdout
        refusing = len(up.pid_of("blockrelay_worker"))
        wait_until(lambda: len(up.pid_of("blockrelay_worker")) != refusing, "it is tried again", timeout_s=60)
        replace(whole)
        wait_until(lambda: httpx.get(f"{up.url}/readyz", timeout=60).status_code == 200, "it serves", timeout_s=60)
        assert up.tokens(**body) == expected
    lines = capfd.readouterr().err.splitlines()
    assert len([line for line in lines if "block_2.onnx: altered" in line]) == 1, lines
    assert len([line for line in lines if "starting it again every 5 s" in line]) == 1, lines


def ready_devices(up: UpProcess) -> list[str]:
    """Of its workers that have a stage."""
    return [worker["device"] for worker in up.status()["workers"] if worker["ready"]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--blocks", "my-blocks", "--stand-in", "files"], "--stand-in is for --blocks with --gpu"),
        (["--blocks", "nowhere"], "there is no such folder"),
        (["--blocks", "empty"], "has no ONNX files"),
        (["--blocks", "my-blocks", "--stages", "5"], "stages is 5, but the model has 4 blocks"),
        (["--blocks", "my-blocks", "--model", "x"], "--blocks is instead of --model"),
        (["--max-position", "8"], "--max-position is for --blocks"),
        (["--sequential"], "--sequential is for --blocks"),
        (["--blocks", "my-blocks", "--memory", "8"], "--memory is for --sequential"),
    ],
)
def test_what_cannot_be_served_ends_up_with_one_line(tmp_path: Path, options: list[str], said: str) -> None:
    write_reference_blocks(tmp_path / "my-blocks", MODEL)
    (tmp_path / "empty").mkdir()
    environment = {**os.environ, "BLOCKRELAY_CACHE_DIR": str(tmp_path / "cache")}
    done = run_command("up", "--port", "0", *options, cwd=tmp_path, env=environment)
    assert done.returncode == 2 and not done.stdout, done
    assert said in done.stderr.splitlines()[-1]

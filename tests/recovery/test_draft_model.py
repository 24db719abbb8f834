"""A draft model changes nothing but the time: tokens, log probabilities and ends are those of a run without it."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from blockrelay_converter.convert import convert
from tests.support.models.checkpoints import write_checkpoint
from tests.support.systems.system import (
    Golden,
    StartSystem,
    System,
    assert_nothing_is_held,
    assert_undisturbed,
    make_jobs,
    serve,
    start_all,
)
from tests.support.waiting import wait_until

DRAFTED = "blockrelay_worker_draft_model_tokens_total"
RIGHT = "blockrelay_worker_draft_model_accepted_tokens_total"
#: Of the tiny model's four layers: keys and values, 2 heads of 16, 16 tokens, float16.
PAGE_BYTES = 2 * 4 * 2 * 16 * 16 * 2


def _model(root: Path, **checkpoint: object) -> Path:
    write_checkpoint(root / "checkpoint", **checkpoint)  # pyright: ignore[reportArgumentType]
    convert(root / "checkpoint", root / "model", precision="w8a8", report=lambda what, done, total: None)
    return root / "model"


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another random model with the tokenizer of the tiny one: smaller, and with a context of 128 tokens."""
    return _model(tmp_path_factory.mktemp("other"), seed=9, num_hidden_layers=1, max_position_embeddings=128)


@pytest.fixture(scope="module")
def other_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _model(tmp_path_factory.mktemp("vocabulary"), seed=9, num_hidden_layers=1, vocab_size=600)


def drafting(draft: Path, **worker: str) -> dict[str, str]:
    """The settings of workers that guess with every step, so that no measurement decides what a test sees."""
    return {"draft_model": str(draft), "draft_tokens": "5", **worker}


def right_share(system: System) -> float:
    """The share of guesses that were right; fails without any."""
    drafted = system.metric(DRAFTED)
    assert drafted > 100
    return system.metric(RIGHT) / drafted


@pytest.mark.parametrize("stages", [1, 2])
def test_with_the_very_same_model_every_guess_is_right_and_every_bit_the_same(
    start_system: StartSystem, tiny_model: Path, stages: int
) -> None:
    system = start_system(stages=stages, worker=drafting(tiny_model))
    jobs = make_jobs(12, seed=31, vocab=500, longest=80, tokens=60)
    jobs += [replace(job, request_id=f"{job.request_id}-p", params=replace(job.params, logprobs=3)) for job in jobs[:4]]
    serve(system, jobs)
    # Guesses behind the end of a request are never judged.
    assert right_share(system) > 0.8
    assert_nothing_is_held(system)


@pytest.mark.parametrize("stages", [1, 2])
def test_with_another_random_model_guesses_are_wrong_and_every_bit_the_same(
    start_system: StartSystem, other_model: Path, stages: int
) -> None:
    system = start_system(stages=stages, worker=drafting(other_model))
    jobs = make_jobs(12, seed=32, vocab=500, longest=150, tokens=60)  # some are longer than the draft's context
    serve(system, jobs)
    assert right_share(system) < 0.5


def test_runs_that_lose_their_pages_are_guessed_for_again(start_system: StartSystem, tiny_model: Path) -> None:
    worker = drafting(tiny_model, kv_bytes=str(24 * PAGE_BYTES))  # a half is for the draft model
    system = start_system(worker=worker)
    assert [w.pages for w in system.infos()] == [12]
    jobs = make_jobs(20, seed=33, vocab=500, longest=60, tokens=70)
    serve(system, jobs)
    assert system.metric("blockrelay_worker_num_preemptions_total") > 0
    assert right_share(system) > 0.5


@pytest.mark.parametrize("stage", [0, 1])
def test_kill_9_in_the_middle_of_guesses_changes_no_token(
    start_system: StartSystem, tiny_model: Path, long_jobs: Golden, stage: int
) -> None:
    jobs, golden = long_jobs
    system = start_system(stages=2, worker=drafting(tiny_model))
    start_all(system, jobs)
    pid = system.pid_of(stage)
    os.kill(pid, signal.SIGKILL)
    next(w for w in system.workers if w.pid == pid).wait()
    system.start_worker(**drafting(tiny_model))
    assert_undisturbed(system, jobs, golden)


def test_a_damaged_draft_model_leaves_a_worker_that_serves_without_it(
    start_system: StartSystem, other_model: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    subprocess.run(["cp", "-r", other_model, damaged], check=True)
    block = next((damaged / "blocks").iterdir())
    content = bytearray(block.read_bytes())
    content[len(content) // 2] ^= 0xFF
    block.write_bytes(content)
    system = start_system(worker=drafting(damaged))
    serve(system, make_jobs(4, seed=34, vocab=500, tokens=20))
    assert system.metric(DRAFTED) == 0
    log = (system.folder / "worker-0.log").read_text()
    assert log.count("DRAFT_MODEL_OFF") == 1 and "SHA-256" in log


def test_guesses_begin_by_themselves_where_they_pay(start_system: StartSystem, tiny_model: Path) -> None:
    """The served model is slowed down: the same one as draft model, which is not, costs little beside it."""
    system = start_system(worker={"draft_model": str(tiny_model), "inject_speed": "0.03"})
    jobs = make_jobs(4, seed=35, vocab=500, longest=10, tokens=400)
    for job in jobs:  # one after the other, each as a user alone
        system.accept(job)
        system.wait_all([job])
    assert_undisturbed(system, jobs)
    assert "DRAFT_MODEL_PAYS" in (system.folder / "worker-0.log").read_text()
    assert right_share(system) > 0.8


@pytest.mark.parametrize("command", ["worker", "up"])
@pytest.mark.parametrize("wrong", ["vocabulary", "missing"])
def test_a_model_that_cannot_draft_ends_the_command_in_one_line(
    tiny_model: Path, other_vocabulary: Path, tmp_path: Path, command: str, wrong: str
) -> None:
    draft = other_vocabulary if wrong == "vocabulary" else tmp_path / "nothing"
    module = {"worker": ["blockrelay_worker"], "up": ["blockrelay_launcher", "up", "--port", "0"]}[command]
    argv = [sys.executable, "-m", *module, "--model", str(tiny_model), "--draft-model", str(draft)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert ("600 tokens, not 512" if wrong == "vocabulary" else str(draft)) in done.stderr


def test_a_worker_on_a_gpu_takes_no_draft_model(tiny_model: Path) -> None:
    argv = [sys.executable, "-m", "blockrelay_worker", "--gpu", "webgpu:0"]
    argv += ["--model", str(tiny_model), "--draft-model", str(tiny_model)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "draft_model is for workers on CPUs" in done.stderr


def test_the_pages_of_ended_requests_are_free_again(start_system: StartSystem, tiny_model: Path) -> None:
    """More tokens than the draft model's pages hold together, one request after the other."""
    system = start_system(worker=drafting(tiny_model, kv_bytes=str(16 * PAGE_BYTES), prefix_cache="false"))
    jobs = make_jobs(10, seed=36, vocab=500, longest=20, tokens=60)
    for job in jobs:
        before = system.metric(DRAFTED)
        system.accept(job)
        system.wait_all([job])
        wait_until(lambda before=before: system.metric(DRAFTED) > before, "this one was guessed for")
    assert_undisturbed(system, jobs)

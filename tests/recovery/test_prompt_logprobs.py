"""Log probabilities of prompts have the bits of a solo run, in any batch, on any number of stages, and after deaths."""

import math
import os
import signal
from collections.abc import Sequence
from dataclasses import replace

import httpx
import numpy as np
import pytest

from blockrelay.protocol.encoding.prompt_logprobs import PromptLogprobs
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_worker.offline.evaluate import score
from blockrelay_worker.offline.pipeline import Pipeline
from tests.support.prompt_logprobs import reference_scores
from tests.support.systems.system import Job, StartSystem, System, assert_undisturbed, make_jobs, start_all


def scoring(jobs: Sequence[Job]) -> list[Job]:
    """The jobs, of which two in three ask for log probabilities of their prompts, and some have a prompt in common."""
    common = tuple(int(token) for token in np.random.default_rng(5).integers(3, 500, 50))
    made: list[Job] = []
    for at, job in enumerate(jobs):
        listed = (None, 0, 20)[at % 3]
        prompt = common + job.prompt[: 1 + at] if at % 2 else job.prompt
        made.append(replace(job, prompt=prompt, params=replace(job.params, prompt_logprobs=listed)))
    return made


def assert_scored(system: System, jobs: Sequence[Job]) -> None:
    """The ends of the jobs have the numbers of a solo run, and those without are the jobs that did not ask."""
    pipeline = Pipeline(system.block_folder, stages=1, threads=1, tokens=system.block_folder.model.max_position)
    for job in jobs:
        _, end = system.log(job.request_id)
        assert end is not None
        listed = job.params.prompt_logprobs
        expected = None if listed is None else reference_scores(pipeline, job.prompt, listed=listed)
        assert end.meta.get("prompt_logprobs") == expected, job.request_id


@pytest.mark.parametrize("stages", [1, 3])
def test_numbers_are_those_of_a_solo_run(start_system: StartSystem, stages: int) -> None:
    """In mixed batches, whose prompts are in the prefix cache in part."""
    system = start_system(stages=stages)
    jobs = scoring(make_jobs(18, seed=41, vocab=500, tokens=20))
    system.accept_all(jobs)
    assert_undisturbed(system, jobs)
    assert_scored(system, jobs)
    again = [replace(job, request_id=f"{job.request_id}-again") for job in jobs]
    system.accept_all(again)
    system.wait_all(again)
    assert_scored(system, again)


def test_a_client_reads_them_over_http_as_an_offline_evaluation_measures_them(start_system: StartSystem) -> None:
    system = start_system(stages=2)
    url, _ = system.start_gateway()
    rng = np.random.default_rng(43)
    prompts = [rng.integers(3, 500, size).tolist() for size in (2, 40, 300)]
    body = {"prompt": prompts, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    with httpx.Client(base_url=url, timeout=60) as http:
        answer = http.post("/v1/completions", json=body)
        nothing = http.post("/v1/completions", json=body | {"max_tokens": 0})
    assert answer.status_code == nothing.status_code == 200, answer.text
    folder = system.block_folder
    assert folder.tokenizer_path is not None
    tokenizer = Tokenizer.from_file(folder.tokenizer_path)
    pipeline = Pipeline(folder, stages=1, threads=1, tokens=folder.model.max_position)
    for prompt, choice, other in zip(prompts, answer.json()["choices"], nothing.json()["choices"], strict=True):
        exact = PromptLogprobs.decode(reference_scores(pipeline, prompt, listed=1), tokens=len(prompt))
        told = choice["logprobs"]["token_logprobs"]
        assert told[1:-1] == exact.logprobs.tolist() and other["logprobs"]["token_logprobs"] == told[:-1]
        measured = score(pipeline, prompt, tokenizer, context=512, stride=256, done=lambda *_: None)
        assert -math.fsum(told[1:-1]) == pytest.approx(measured.nll, rel=1e-12)


@pytest.mark.parametrize("stages", [1, 3])
def test_kill_9_changes_no_number(start_system: StartSystem, stages: int) -> None:
    jobs = scoring(make_jobs(9, seed=42, vocab=500, tokens=120))
    system = start_system(stages=stages)
    start_all(system, jobs)
    for stage in {0, stages - 1}:
        os.kill(system.pid_of(stage), signal.SIGKILL)
        system.start_worker()
    assert_undisturbed(system, jobs)
    assert sum(system.reruns().values()) > 0, "some ran again"
    assert_scored(system, jobs)

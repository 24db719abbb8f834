"""Requests with penalties, biases and forbidden words keep their tokens when workers die in the middle of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.support.systems.system import Job, StartSystem, make_jobs, serve, serve_while_workers_die

CHANGES: tuple[Mapping[str, Any], ...] = (
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.8, "frequency_penalty": 0.3},
    {"frequency_penalty": -0.6, "logit_bias": ((7, 3.0), (11, -100.0))},
    {"min_tokens": 40, "ignore_eos": False, "bad_words": ((7,), (11, 12))},
    {},
)


def changed(jobs: list[Job]) -> list[Job]:
    """The jobs, each with one of CHANGES."""
    return [replace(job, params=replace(job.params, **CHANGES[at % len(CHANGES)])) for at, job in enumerate(jobs)]


@pytest.mark.parametrize("stages", [1, 3])
def test_tokens_are_those_of_a_solo_run(start_system: StartSystem, stages: int) -> None:
    """In mixed batches, with drafts, of whose tokens later ones depend."""
    serve(start_system(stages=stages), changed(make_jobs(20, seed=31, vocab=500, tokens=80)))


def test_kill_9_changes_no_token(start_system: StartSystem) -> None:
    jobs = changed(make_jobs(10, seed=32, vocab=500, tokens=300))
    serve_while_workers_die(start_system(stages=2, replicas=2), jobs)

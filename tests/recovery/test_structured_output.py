"""Requests that follow a grammar keep their tokens in any batch, on any number of stages, and when workers die."""

from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher, grammar_from

from tests.support.systems.system import Job, StartSystem, make_jobs, serve, serve_while_workers_die

FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "places": {"type": "array", "items": {"enum": ["garden", "kitchen", "hall"]}, "minItems": 2, "maxItems": 20},
    },
    "required": ["name", "age", "places"],
    "additionalProperties": False,
}
GRAMMARS = (
    LLMatcher.grammar_from_json_schema(PERSON, overrides=FORM),
    "",
    LLMatcher.grammar_from_regex("([a-z]{2,7} ){20,40}end"),
    grammar_from("grammar", 'start: ("(" start ")" | "x")+'),
)


def following(jobs: list[Job]) -> list[Job]:
    """The jobs, each with one of GRAMMARS; some also have penalties."""
    found: list[Job] = []
    for at, job in enumerate(jobs):
        grammar = GRAMMARS[at % len(GRAMMARS)]
        penalty = 0.5 if at % 3 == 0 else 0.0
        params = replace(job.params, grammar=grammar, ignore_eos=not grammar, presence_penalty=penalty)
        found.append(replace(job, params=params))
    return found


@pytest.mark.parametrize("stages", [1, 3])
def test_tokens_are_those_of_a_solo_run(start_system: StartSystem, stages: int) -> None:
    """In mixed batches, where the first stage adds tokens that the grammar forces."""
    serve(start_system(stages=stages), following(make_jobs(24, seed=41, vocab=500, tokens=120)))


def test_kill_9_changes_no_token(start_system: StartSystem) -> None:
    jobs = following(make_jobs(12, seed=42, vocab=500, tokens=300))
    serve_while_workers_die(start_system(stages=2, replicas=2), jobs)

"""Guessed tokens change nothing but the time: every token, log probability and end is that of a run without guesses."""

from dataclasses import replace

import pytest

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.protocol.messages import TokenEntry, TokenLogprobs
from blockrelay.protocol.sampling_params import SamplingParams, derive_seed
from blockrelay.settings import BUNDLED_MODEL
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_worker.offline.pipeline import Generated, Pipeline, generate
from tests.support.cell import read_log
from tests.support.systems.system import Job, StartSystem, assert_nothing_is_held

OPENINGS = (
    "Once upon a time there was a fox. The fox was red. The fox was",
    "Lily had a red ball. Tom had a blue ball. Lily had a red ball. Tom had",
    "One day, one day, one day, one day, one",
    "Tell me a story.",
)
Golden = dict[str, Generated]


def story_jobs() -> list[Job]:
    """Greedy and sampled, plain, with log probabilities, with stop strings: what repeats and what does not."""
    tokenizer = Tokenizer.from_file(BUNDLED_MODEL / "tokenizer.json")
    jobs: list[Job] = []
    for i in range(16):
        params = SamplingParams(
            max_tokens=200,
            temperature=(0.0, 0.3, 0.8, 0.0)[i % 4],
            top_p=0.95,
            ignore_eos=i % 2 == 0,
            logprobs=3 if i % 5 == 1 else None,
            stop=(" and the",) if i % 7 == 3 else (),
        )
        prompt = tuple(tokenizer.encode(OPENINGS[i % 4] if i < 8 else OPENINGS[(i + i // 4) % 4] + " the"))
        jobs.append(Job(request_id=f"req-story-{i}", prompt=prompt, params=params))
    return jobs


@pytest.fixture(scope="module")
def stories() -> tuple[list[Job], Golden]:
    """The jobs and what each gives alone, in one process, without guesses."""
    folder, jobs = open_block_folder(BUNDLED_MODEL), story_jobs()
    tokenizer = Tokenizer.from_file(BUNDLED_MODEL / "tokenizer.json")
    pipeline = Pipeline(folder, stages=1, threads=1, tokens=folder.model.max_position)
    golden = {
        job.request_id: generate(
            pipeline, job.prompt, job.params, seed=derive_seed(job.request_id), tokenizer=tokenizer
        )
        for job in jobs
    }
    assert sum(len(g.tokens) for g in golden.values()) > 1500
    return jobs, golden


@pytest.mark.parametrize(("stages", "speculation"), [(1, "on"), (3, "on"), (1, "off")])
def test_tokens_are_the_same_with_and_without_guesses(
    start_system: StartSystem, stories: tuple[list[Job], Golden], stages: int, speculation: str
) -> None:
    jobs, golden = stories
    system = start_system(stages=stages, worker={"speculation": speculation}, model=BUNDLED_MODEL)
    system.accept_all(jobs)
    system.wait_all(jobs)
    assert system.results(jobs) == {request_id: one.tokens for request_id, one in golden.items()}
    for job in jobs:
        end = system.log(job.request_id)[1]
        assert end is not None and end.reason == golden[job.request_id].finish_reason
        if job.params.logprobs is not None:
            entries = read_log(system.client, system.keys, job.request_id)  # pyright: ignore
            told = [TokenLogprobs.decode(e.logprobs) for e in entries if isinstance(e, TokenEntry)]
            assert told == [TokenLogprobs(s.logprob or 0.0, s.top) for s in golden[job.request_id].sampled]
    accepted = system.metric("blockrelay_worker_spec_decode_num_accepted_tokens_total")
    drafted = system.metric("blockrelay_worker_spec_decode_num_draft_tokens_total")
    assert 100 < accepted <= drafted if speculation == "on" else drafted == 0
    assert_nothing_is_held(system)


def test_one_request_alone_is_guessed_ahead_and_ends_where_it_should(
    start_system: StartSystem, stories: tuple[list[Job], Golden]
) -> None:
    """Several tokens per step, and the last step is cut at max_tokens."""
    system = start_system(stages=2, model=BUNDLED_MODEL)
    job, golden = stories[0][0], stories[1]
    for tokens in (1, 2, 3, 50, 51, 52):
        short = replace(job, request_id=f"req-short-{tokens}", params=replace(job.params, max_tokens=tokens))
        system.accept(short)
        system.wait_all([short])
        assert system.results([short]) == {short.request_id: golden[job.request_id].tokens[:tokens]}

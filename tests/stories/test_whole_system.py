"""The whole system as users meet it: `blockrelay up`, the `openai` package, and `blockrelay generate` as the judge."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.text.tokenizer import IncrementalText, Tokenizer
from tests.support.models.tiny_model import write_tiny_model
from tests.support.scraping import sampled
from tests.support.systems.failing_gpus import failing_gpus
from tests.support.systems.system import Job, golden_tokens, make_jobs
from tests.support.systems.up_process import UpProcess, running_up
from tests.support.waiting import wait_until

PROMPT = "The quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module", params=[1, 2, 3], ids="stages={}".format)
def up(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[UpProcess]:
    with running_up(tiny_model, "--stages", str(request.param)) as process:
        yield process
        assert process.stop() == 0


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    text: str
    finish_reason: str


def generate(model: Path, *options: str) -> Answer:
    """What the command gives in one process, without any service."""
    command = [sys.executable, "-m", "blockrelay_launcher", "generate", "--model", str(model), "--json", *options]
    found = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    return Answer(found["tokens"], found["text"], found["finish_reason"])


def complete(client: OpenAI, prompt: str | list[int], *, stream: bool, **fields: object) -> Answer:
    """One completion through the client, whole or as a stream."""
    extra = {"return_token_ids": True, "ignore_eos": True, **fields}
    if not stream:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=40, extra_body=extra)
        choice = answer.choices[0]
        assert answer.usage is not None and answer.usage.completion_tokens == len(choice.token_ids)  # pyright: ignore
        assert answer.system_fingerprint is not None and answer.system_fingerprint.startswith("w8a8-")
        return Answer(choice.token_ids, choice.text, choice.finish_reason)  # pyright: ignore
    tokens: list[int] = []
    text = reason = ""
    for event in client.completions.create(model="tiny", prompt=prompt, max_tokens=40, stream=True, extra_body=extra):
        for choice in event.choices:
            tokens += getattr(choice, "token_ids", None) or []
            text += choice.text
            reason = choice.finish_reason or reason
    return Answer(tokens, text, reason)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
def test_the_openai_client_gets_the_tokens_of_generate(
    up: UpProcess, tiny_model: Path, stream: bool, sampled: bool
) -> None:
    fields: dict[str, object] = (
        {"temperature": 0.9, "top_p": 0.8, "top_k": 50, "seed": 7} if sampled else {"temperature": 0}
    )
    options = [o for name, value in fields.items() for o in (f"--{name.replace('_', '-')}", str(value))]
    expected = generate(tiny_model, "--prompt", PROMPT, "--max-tokens", "40", "--ignore-eos", *options)
    with OpenAI(base_url=f"{up.url}/v1", api_key="none") as client:
        assert complete(client, PROMPT, stream=stream, **fields) == expected


def test_chat_streams_what_it_answers_whole(up: UpProcess) -> None:
    messages: list[dict[str, str]] = [{"role": "user", "content": "Who has the ball?"}]
    fields = {"model": "tiny", "messages": messages, "max_completion_tokens": 20, "seed": 3}
    text, usage = "", None
    with OpenAI(base_url=f"{up.url}/v1", api_key="none") as client:
        whole = client.chat.completions.create(**fields)  # pyright: ignore
        stream = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})  # pyright: ignore
        for event in stream:
            text += "".join(choice.delta.content or "" for choice in event.choices)
            usage = event.usage or usage
    assert text == whole.choices[0].message.content
    found_again = {"prompt_tokens_details"}  # the stream's prompt was known by then
    assert usage is not None and whole.usage is not None
    assert usage.model_dump(exclude=found_again) == whole.usage.model_dump(exclude=found_again)


def test_fifty_requests_at_once_each_equal_their_solo_runs(up: UpProcess, tiny_model: Path) -> None:
    jobs = make_jobs(50, seed=31, vocab=500, longest=150, tokens=30)
    assert run_jobs(up, jobs) == expected_answers(tiny_model, jobs)


def _tokens_relayed(up: UpProcess) -> float:
    return sampled(httpx.get(f"{up.url}/metrics").text, "blockrelay_generation_tokens_total")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_kill_9_of_each_worker_under_twenty_requests_changes_nothing(tiny_model: Path, stage: int) -> None:
    jobs = make_jobs(20, seed=33, vocab=500, tokens=250)
    with running_up(tiny_model, "--stages", "3") as up, ThreadPoolExecutor(1) as pool:
        answers = pool.submit(run_jobs, up, jobs)
        wait_until(lambda: _tokens_relayed(up) >= 1000, "a fifth of all tokens are there")
        os.kill(up.pid_of("blockrelay_worker")[stage], signal.SIGKILL)
        assert answers.result(60) == expected_answers(tiny_model, jobs)
        assert up.stop() == 0


def test_blocks_of_8_and_of_4_bits_pass_through_two_stages_and_share_pages_as_exactly(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, "w4a8,block_2=w8a8,block_5=w8a8")
    jobs = make_jobs(12, seed=37, vocab=500, longest=100, tokens=30)
    with running_up(model, "--stages", "2") as up:
        expected = expected_answers(model, jobs)
        assert run_jobs(up, jobs) == expected
        assert run_jobs(up, jobs) == expected  # now their prompts are known
        with OpenAI(base_url=f"{up.url}/v1", api_key="none") as client:
            answer = client.completions.create(model="tiny", prompt=PROMPT)
        assert answer.system_fingerprint is not None and answer.system_fingerprint.startswith("mixed-")


def test_a_failing_gpu_shows_in_the_answer_and_changes_no_token(tiny_model: Path) -> None:
    jobs = make_jobs(6, seed=35, vocab=500, tokens=60)
    fallbacks: list[dict[str, object]] = []
    with running_up(tiny_model, "--stages", "2") as up, failing_gpus(up, tiny_model, 1, after=5):
        assert run_jobs(up, jobs, fallbacks) == expected_answers(tiny_model, jobs)
        assert fallbacks and {f["reason"] for f in fallbacks} == {"gpu_driver_error"}
        assert "blockrelay_request_fallbacks_total{" in httpx.get(f"{up.url}/metrics").text


def run_jobs(
    up: UpProcess, jobs: list[Job], fallbacks: list[dict[str, object]] | None = None
) -> list[tuple[list[int], str]]:
    """(tokens, text) of every job, all sent at once; adds what was reported as fallback."""

    def one(job: Job) -> tuple[list[int], str]:
        params = job.params
        body = {
            "model": "tiny",
            "prompt": list(job.prompt),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "ignore_eos": True,
            "return_token_ids": True,
            "seed": 5,
        }
        answer = httpx.post(f"{up.url}/v1/completions", json=body, timeout=90)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        if fallbacks is not None:
            fallbacks.extend(found.get("fallback_events") or [])
        return found["choices"][0]["token_ids"], found["choices"][0]["text"]

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(one, jobs))


def expected_answers(model: Path, jobs: list[Job]) -> list[tuple[list[int], str]]:
    folder = open_block_folder(model)
    assert folder.tokenizer_path is not None
    tokenizer = Tokenizer.from_file(folder.tokenizer_path)
    golden = golden_tokens(folder, jobs, seed=5)

    def text(job: Job) -> str:  # what the tokens add to a prompt that may end within a character
        added = IncrementalText(tokenizer, job.prompt)
        return "".join(added.push(token) for token in golden[job.request_id]) + added.finish()

    return [(golden[job.request_id], text(job)) for job in jobs]

"""Where guesses and found pages could show: every end of a request in the middle of a draft, every row behind a hit.

The text of the prompt repeats itself, so guesses are right often and wrong now and then; all requests share it, so its
pages are found. Each answer must be the solo run's.
"""

import base64
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import httpx
import numpy as np
import pytest

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.protocol.tensors import decode_tensor
from blockrelay.settings import BUNDLED_MODEL
from blockrelay.text.tokenizer import Tokenizer
from tests.support.systems.equality_crowd import ask_in_waves, worker_counters
from tests.support.systems.equality_workload import Asked
from tests.support.systems.solo_runs import Solo
from tests.support.systems.up_process import UpProcess, running_up
from tests.support.waiting import wait_until

TEXT = "Tom had a red ball. Lily had a blue kite. Tom and Lily went to the river. " * 4 + "Tom had"
NEW = 40
GREEDY = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True, seed=1)
SAMPLED = replace(GREEDY, temperature=0.7, top_p=0.9)

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def solo() -> Solo:
    return Solo(BUNDLED_MODEL)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    path = open_block_folder(BUNDLED_MODEL, blocks=[]).tokenizer_path
    assert path is not None
    return Tokenizer.from_file(path).encode(TEXT)


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, id="stages=1"), pytest.param(2, id="stages=2", marks=pytest.mark.equality)],
)
def up(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    """A system that at the end has guessed right, guessed wrong and found pages: nothing here was tested otherwise."""
    data = tmp_path_factory.mktemp("up") / "data"
    with running_up(BUNDLED_MODEL, "--stages", str(request.param), data=data) as process:
        workers = process.pid_of("blockrelay_worker")
        yield process
        counted = worker_counters(process)
        assert process.pid_of("blockrelay_worker") == workers, "a worker fell over, and another answered"
        assert process.stop() == 0
    accepted = counted["blockrelay_worker_spec_decode_num_accepted_tokens_total"]
    assert 0 < accepted < counted["blockrelay_worker_spec_decode_num_draft_tokens_total"]
    assert counted["blockrelay_worker_prefix_cache_hits_total"] > 0


def check(up: UpProcess, solo: Solo, prompt: list[int], variants: list[SamplingParams]) -> None:
    """The prompt with each of these parameters, many at once."""
    asks = [
        Asked(name=str(i), prompt=tuple(prompt), params=params, stream=i % 3 == 0) for i, params in enumerate(variants)
    ]
    answers = ask_in_waves(up.url, asks, seed=1, at_once=12)
    for params, answer in zip(variants, answers, strict=True):
        assert answer == solo.answer(prompt, params), params


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_max_tokens_ends_a_request_anywhere_in_a_draft(
    up: UpProcess, solo: Solo, prompt: list[int], params: SamplingParams
) -> None:
    check(up, solo, prompt, [replace(params, max_tokens=n) for n in range(1, NEW + 1, 2)])


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_stop_string_ends_a_request_anywhere_in_a_draft(
    up: UpProcess, solo: Solo, prompt: list[int], params: SamplingParams
) -> None:
    text = solo.answer(prompt, params).text
    check(up, solo, prompt, [replace(params, stop=(text[i : i + 4],)) for i in range(0, len(text) - 4, 7)])


def test_a_stop_token_ends_a_request_anywhere_in_a_draft(up: UpProcess, solo: Solo, prompt: list[int]) -> None:
    tokens = dict.fromkeys(solo.answer(prompt, GREEDY).tokens)
    check(up, solo, prompt, [replace(GREEDY, stop_token_ids=(token,)) for token in tokens])


def test_log_probabilities_of_guessed_tokens_are_those_of_single_steps(
    up: UpProcess, solo: Solo, prompt: list[int]
) -> None:
    check(up, solo, prompt, [replace(params, logprobs=n) for params in (GREEDY, SAMPLED) for n in (0, 3)])


def test_the_end_of_the_context_ends_a_request_in_a_draft(up: UpProcess, solo: Solo, prompt: list[int]) -> None:
    context = open_block_folder(BUNDLED_MODEL, blocks=[]).model.max_position
    long = (prompt * 20)[: context - 12]
    check(up, solo, long, [replace(GREEDY, max_tokens=n) for n in (12, 11, 5)])


def step(http: httpx.Client, session: str, number: int, tokens: list[int], logits: str) -> Any:
    """Logits [n, vocab] of one step of a tensor session."""
    raw = base64.b64encode(np.array(tokens, "<i8").tobytes()).decode()
    ids = {"_tensor_": True, "dtype": "int64", "shape": [1, len(tokens)], "data_b64": raw}
    body = {"session_id": session, "step": number, "logits": logits, "input_tensors": {"input_ids": ids}}
    answer = http.post("/v1/infer", json=body).json()
    assert answer["status"] == "success", answer
    return decode_tensor(answer["outputs"]["logits"], param="logits", max_elements=1 << 24)[0]


def test_a_tensor_step_gives_the_logits_of_rows_whose_pages_are_known(
    up: UpProcess, solo: Solo, prompt: list[int]
) -> None:
    check(up, solo, prompt, [GREEDY])  # now every page of the prompt is known
    expected = solo.logits(prompt)
    with httpx.Client(base_url=up.url, timeout=60) as http:
        assert step(http, "all", 1, prompt, "all").tobytes() == expected.tobytes()
        assert step(http, "last", 1, prompt, "last").tobytes() == expected[-1:].tobytes()
        sizes = [16, 1, 15, 17, 31, 5, len(prompt) - 85]
        for number, (end, size) in enumerate(zip(accumulate(sizes), sizes, strict=True), 1):
            got = step(http, "steps", number, prompt[end - size : end], "all")
            assert got.tobytes() == expected[end - size : end].tobytes(), f"step {number}"


def test_a_request_that_is_ended_from_outside_has_a_beginning_of_its_solo_answer(
    up: UpProcess, solo: Solo, prompt: list[int]
) -> None:
    params = replace(GREEDY, max_tokens=400)
    alone = solo.answer(prompt, params).text
    body = {"prompt": prompt, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "background": True}
    with httpx.Client(base_url=up.url, timeout=60) as http:

        def state(request_id: str) -> dict[str, Any]:
            return http.get(f"/v1/requests/{request_id}").json()

        started = [http.post("/v1/completions", json=body).json()["id"] for _ in range(2)]
        wait_until(lambda: len(state(started[0])["text"]) > 40, "the first one has some text")
        assert http.post(f"/v1/requests/{started[0]}/cancel").status_code == 200
        for request in started:
            wait_until(lambda: state(request)["status"] not in ("queued", "running"), "it ends")  # noqa: B023
            assert alone.startswith(state(request)["text"])
        assert state(started[1])["text"] == alone

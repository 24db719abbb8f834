"""What answers say of prompts: `echo` and `prompt_logprobs`, from the log alone."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import BadRequest
from blockrelay.protocol.encoding.prompt_logprobs import MAX_PROMPT_VALUES, PromptLogprobs
from blockrelay.protocol.messages import Claimed, TokenLogprobs
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.api.openai.requests import OpenAIRequests
from tests.support.gateway.openai_requests import chat, complete
from tests.support.gateway.played import PlayedWorker, RunningGateway, answering

CHAT = [{"role": "user", "content": "Who has the ball?"}]


def scores(prompt: Sequence[int], listed: int) -> PromptLogprobs:
    """Made-up numbers: token n has the log probability -n and the rank n + 2; the likeliest are tokens 40, 41, ..."""
    count = len(prompt) - 1
    ids = np.tile(np.arange(40, 40 + listed, dtype=np.uint32), (count, 1))
    return PromptLogprobs(
        logprobs=-np.arange(1.0, count + 1),
        ranks=np.arange(3, count + 3, dtype=np.uint32),
        top_ids=ids,
        top_logprobs=(39.0 - ids) / 8,
    )


def scoring(worker: PlayedWorker, tokens: list[int]) -> Any:
    """A worker that says `tokens` to every request, with numbers about its prompt where it asks for them."""

    def reply(claimed: Claimed) -> None:
        params, prompt = claimed.body.params, claimed.body.prompt.tolist()
        listed = params["prompt_logprobs"]
        meta = {"seed": 1} | ({} if listed is None else {"prompt_logprobs": scores(prompt, listed).encode()})
        said = tokens[: params["max_tokens"]]
        logprobs = [TokenLogprobs(-0.5, ((40, -0.25),))] * len(said) if params["logprobs"] is not None else None
        worker.say(claimed, said, end="length", meta=meta, logprobs=logprobs)

    return answering(worker, reply)


def test_an_echo_begins_with_the_prompt(gateway: RunningGateway, worker: PlayedWorker, tokenizer: Tokenizer) -> None:
    said = tokenizer.encode(" has a ball.", add_special_tokens=False)
    with scoring(worker, said):
        answer = gateway.post("/v1/completions", prompt="Tom", echo=True, max_tokens=len(said)).json()
        ids = gateway.post("/v1/completions", prompt=tokenizer.encode("Tom"), echo=True, max_tokens=1).json()
        several = gateway.post("/v1/completions", prompt=["Tom", "Lily sat"], echo=True, max_tokens=1).json()
        nothing = gateway.post("/v1/completions", prompt="Tom", echo=True, max_tokens=0).json()
    assert answer["choices"][0]["text"] == "Tom has a ball." and answer["choices"][0]["logprobs"] is None
    assert ids["choices"][0]["text"].startswith("Tom")
    assert [choice["text"].split()[0] for choice in several["choices"]] == ["Tom", "Lily"]
    (choice,) = nothing["choices"]
    assert (choice["text"], choice["finish_reason"], choice["max_tokens"]) == ("Tom", "length", 0)
    assert nothing["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("new", [0, 1, 3])
def test_an_echo_with_logprobs_has_those_of_the_prompt_first(
    gateway: RunningGateway, worker: PlayedWorker, tokenizer: Tokenizer, new: int
) -> None:
    prompt, said = tokenizer.encode("Tom and Lily"), tokenizer.encode(" sat down", add_special_tokens=False)
    with scoring(worker, said):
        answer = gateway.post("/v1/completions", prompt=[prompt], echo=True, logprobs=1, max_tokens=new).json()
    (choice,) = answer["choices"]
    told, tokens = choice["logprobs"], [*prompt, *said[:new]]
    names = [tokenizer.token_bytes(token).decode() for token in tokens]
    assert told["tokens"] == names
    assert told["token_logprobs"] == [None, *(-float(n) for n in range(1, len(prompt))), *[-0.5] * new]
    listed, own = tokenizer.token_bytes(40).decode(), names[1]
    assert told["top_logprobs"][0] is None
    assert told["top_logprobs"][1] == {listed: -0.125} | {own: -1.0}
    assert len(told["top_logprobs"]) == len(told["text_offset"]) == len(tokens)
    places = [*told["text_offset"], len(choice["text"])]
    parts = [choice["text"][begin:end] for begin, end in itertools.pairwise(places)]
    assert parts == [tokenizer.bytes.of(token).decode() for token in tokens]
    assert "prompt_logprobs" not in choice


def test_prompt_logprobs_are_told_as_vllm_tells_them(
    gateway: RunningGateway, worker: PlayedWorker, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode("Tom and Lily")
    with scoring(worker, [5]):
        answer = gateway.post("/v1/completions", prompt="Tom and Lily", max_tokens=1, prompt_logprobs=2).json()
        of_chat = gateway.post("/v1/chat/completions", messages=CHAT, max_tokens=1, prompt_logprobs=0).json()
        both = gateway.post(
            "/v1/completions", prompt=prompt, max_tokens=1, prompt_logprobs=0, echo=True, logprobs=2
        ).json()
    first, second, *_ = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert list(second) == [str(prompt[1]), "40", "41"]
    assert second[str(prompt[1])] == {
        "logprob": -1.0,
        "rank": 3,
        "decoded_token": tokenizer.token_bytes(prompt[1]).decode(),
    }
    assert second["41"] == {"logprob": -0.25, "rank": 2, "decoded_token": tokenizer.token_bytes(41).decode()}
    assert len(answer["choices"][0]["prompt_logprobs"]) == len(prompt)
    assert len(of_chat["prompt_logprobs"]) == of_chat["usage"]["prompt_tokens"]
    assert [len(one) for one in of_chat["prompt_logprobs"][1:]] == [1] * (len(of_chat["prompt_logprobs"]) - 1)
    (choice,) = both["choices"]
    assert [len(one) for one in choice["prompt_logprobs"][1:]] == [1] * (len(prompt) - 1)
    assert len(choice["logprobs"]["top_logprobs"][1]) == 3


def test_a_repeated_request_gets_the_same_answer_from_the_log(gateway: RunningGateway, worker: PlayedWorker) -> None:
    body = {"prompt": "Tom and Lily", "max_tokens": 2, "echo": True, "logprobs": 1, "prompt_logprobs": 1}
    with scoring(worker, [5, 6]):
        answers = [
            gateway.http.post("/v1/completions", content=json.dumps(body), headers={"idempotency-key": "k"})
            for _ in range(2)
        ]
    assert answers[1].headers["idempotent-replayed"] == "true"
    assert answers[0].json()["choices"] == answers[1].json()["choices"]


def test_an_end_without_the_numbers_is_an_error(gateway: RunningGateway, worker: PlayedWorker) -> None:
    with answering(worker, lambda _: ([5], "length")):
        answer = gateway.post("/v1/completions", prompt="Tom and", max_tokens=1, prompt_logprobs=1)
    assert answer.status_code == 500 and "log probabilities" in answer.json()["error"]["message"]


def test_workers_are_asked_for_the_most_that_the_answer_shows(requests: OpenAIRequests) -> None:
    assert complete(requests).params.prompt_logprobs is None
    assert complete(requests, echo=True).params.prompt_logprobs is None
    assert complete(requests, echo=True, logprobs=3).params.prompt_logprobs == 3
    assert complete(requests, echo=True, logprobs=3, prompt_logprobs=5).params.prompt_logprobs == 5
    assert complete(requests, logprobs=3, prompt_logprobs=1).params.prompt_logprobs == 1
    assert chat(requests, prompt_logprobs=0).params.prompt_logprobs == 0
    assert complete(requests, echo=True, max_tokens=0).params.max_tokens == 0


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 0, "prompt_logprobs": 1}, "max_tokens", "at least 1"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", "at least 0"),
        ({"echo": True, "background": True}, "echo", "leave out background"),
        ({"prompt_logprobs": 1, "background": True}, "prompt_logprobs", "leave out background"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "between 0 and 20"),
        ({"prompt_logprobs": -1, "echo": True, "logprobs": 1}, "prompt_logprobs", "between 0 and 20"),
        ({"logprobs": 21, "echo": True}, "logprobs", "between 0 and 20"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(
    requests: OpenAIRequests, fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(BadRequest, match=message) as refused:
        complete(requests, **fields)
    assert refused.value.param == param


def test_chats_echo_nothing(requests: OpenAIRequests) -> None:
    assert chat(requests, echo=False).params.prompt_logprobs is None
    with pytest.raises(BadRequest, match="echo") as refused:
        chat(requests, echo=True)
    assert refused.value.param == "echo"


def test_numbers_beyond_what_an_answer_may_have_are_refused(requests: OpenAIRequests, folder: BlockFolder) -> None:
    prompt = [5] * (folder.model.max_position - 1)
    fits = MAX_PROMPT_VALUES // (21 * len(prompt))
    many = {"max_tokens": 1, "prompt_logprobs": 20}
    with pytest.raises(BadRequest, match="an answer at most") as refused:
        complete(requests, prompt=[prompt] * (fits + 1), **many)
    assert refused.value.param == "prompt_logprobs"
    with pytest.raises(ValueError, match="too many values"):  # the helper wants one request: all are fine
        complete(requests, prompt=[prompt] * fits, **many)

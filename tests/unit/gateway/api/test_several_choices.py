"""Several choices of a prompt (`n`): each is a request of its own, with a seed with which it can be had alone."""

from typing import Any

import pytest

from blockrelay.errors import BadRequest
from blockrelay.protocol.encoding.request_ids import sibling
from blockrelay.protocol.messages import Claimed
from blockrelay.protocol.sampling_params import derive_seed
from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.admission.idempotency import Identity, random_identity
from blockrelay_gateway.api.client_headers import ClientHeaders
from blockrelay_gateway.api.openai.requests import OpenAIRequests
from blockrelay_gateway.api.openai.schemas import ChatRequest, CompletionRequest
from tests.support.gateway.openai_requests import chat, complete
from tests.support.gateway.played import PlayedWorker, RunningGateway, answering
from tests.support.gateway.sse_client import Event, read_events
from tests.support.gateway.streams import stream
from tests.support.waiting import wait_until

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Who has the ball?"}]


def completions(requests: OpenAIRequests, **fields: Any) -> list[AdmissionRequest]:
    return requests.completion(CompletionRequest(**fields), ClientHeaders(), Identity("req-00", "hash"))


def by_seed(claimed: Claimed) -> tuple[list[int], str]:
    """An answer that its seed decides: two or three tokens."""
    seed = claimed.body.params["seed"]
    return [seed % 200 + 5] * (2 + seed % 2), "length"


def choices_in(events: list[Event]) -> list[dict[str, Any]]:
    return [choice for event in events if event.data != "DONE" for choice in event.data["choices"]]


def tokens_of(events: list[Event], count: int) -> list[list[int]]:
    """The tokens of each choice, put together from the events of a stream."""
    tokens: list[list[int]] = [[] for _ in range(count)]
    for choice in choices_in(events):
        tokens[choice["index"]] += choice.get("token_ids", [])
    return tokens


def test_a_choice_is_the_request_with_another_id_and_seed(requests: OpenAIRequests) -> None:
    asked = completions(requests, prompt=["a", "b c"], n=3, seed=7, temperature=0.5, max_tokens=4)
    assert [one.request_id for one in asked] == [sibling("req-00", index) for index in range(6)]
    assert [one.params.seed for one in asked] == [7, derive_seed("7:1"), derive_seed("7:2")] * 2
    assert [one.body.params["seed"] for one in asked] == [one.params.seed for one in asked]
    assert [one.body.sample for one in asked] == [0, 1, 2, 0, 1, 2]
    assert [one.body.choices for one in asked] == [6, 1, 1, 1, 1, 1]
    assert {(one.body.group, one.fingerprint, one.params.temperature) for one in asked} == {("req-00", "hash", 0.5)}
    prompts = [one.body.prompt.tolist() for one in asked]
    assert prompts[0] == prompts[1] == prompts[2] != prompts[3] == prompts[4] == prompts[5]


def test_seeds_derive_from_the_id_where_the_client_names_none(requests: OpenAIRequests) -> None:
    asked = completions(requests, prompt=["a", "b"], n=2)
    for first, second in ((asked[0], asked[1]), (asked[2], asked[3])):
        assert first.params.seed == derive_seed(first.request_id)
        assert second.params.seed == derive_seed(f"{first.params.seed}:1")
    alone = completions(requests, prompt="a", n=1)
    assert [(one.request_id, one.body.group, one.body.choices) for one in alone] == [("req-00", "", 1)]


def test_a_chat_has_choices_too(requests: OpenAIRequests) -> None:
    request = ChatRequest.model_validate({"messages": MESSAGES, "n": 128, "best_of": 128, "seed": 1})
    asked = requests.chat(request, ClientHeaders(), random_identity())
    assert len({one.params.seed for one in asked}) == len({one.request_id for one in asked}) == len(asked) == 128
    assert all(one.open_ended for one in asked)


@pytest.mark.parametrize("ask", [complete, chat])
@pytest.mark.parametrize("n", [0, -1, True, 1.5, "2", 129, 1 << 70])
def test_an_n_that_cannot_be_meant_is_refused(requests: OpenAIRequests, ask: Any, n: object) -> None:
    with pytest.raises(BadRequest) as refused:
        ask(requests, n=n)
    assert refused.value.param == "n"


@pytest.mark.parametrize("fields", [{"best_of": 2}, {"n": 3, "best_of": 2}, {"n": 2, "best_of": 3}])
def test_every_choice_is_returned(requests: OpenAIRequests, fields: dict[str, int]) -> None:
    for ask in (complete, chat):
        with pytest.raises(BadRequest, match="leave it out") as refused:
            ask(requests, **fields)
        assert refused.value.param == "best_of"


def test_prompts_and_choices_are_bounded_together(requests: OpenAIRequests) -> None:
    assert len(completions(requests, prompt=["a"] * 4, n=32)) == 128
    with pytest.raises(BadRequest, match="4 prompts with n 33 are 132 choices") as refused:
        completions(requests, prompt=["a"] * 4, n=33)
    assert refused.value.param == "n"


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_each_choice_can_be_had_alone_by_its_seed(gateway: RunningGateway, worker: PlayedWorker, path: str) -> None:
    what: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": [9] * 20}
    what |= {"return_token_ids": True, "seed": 11}
    with answering(worker, by_seed):
        answer = gateway.post(path, **what, n=3).json()
        alone = [gateway.post(path, **what | {"seed": one["seed"]}).json() for one in answer["choices"]]
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2]
    assert [one["choices"][0]["token_ids"] for one in alone] == [one["token_ids"] for one in answer["choices"]]
    new = sum(one["usage"]["completion_tokens"] for one in alone)
    prompt = alone[0]["usage"]["prompt_tokens"]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (prompt, new, prompt + new)


def test_choices_of_several_prompts_come_prompt_by_prompt(gateway: RunningGateway, worker: PlayedWorker) -> None:
    with answering(worker, lambda claimed: ([int(claimed.body.prompt[0])], "length")):
        answer = gateway.post("/v1/completions", prompt=[[10], [20, 21]], n=2, return_token_ids=True).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [[10], [10], [20], [20]]
    assert answer["usage"]["prompt_tokens"] == 3 and answer["usage"]["completion_tokens"] == 4


def test_what_was_found_of_a_prompt_counts_once(gateway: RunningGateway, worker: PlayedWorker) -> None:
    def reply(claimed: Claimed) -> None:
        found = 32 if claimed.body.sample else 16
        worker.say(claimed, [5], end="stop", meta={"cached_tokens": found})

    with answering(worker, reply):
        usage = gateway.post("/v1/completions", prompt=[7] * 40, n=3).json()["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]) == (40, {"cached_tokens": 16})


def test_a_stream_has_each_role_once_and_counts_the_prompt_once(gateway: RunningGateway, worker: PlayedWorker) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "n": 3, "seed": 5, "return_token_ids": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    with answering(worker, by_seed):
        events = stream(gateway, CHAT, **asked, stream_options=options)
        whole = gateway.post(CHAT, **asked).json()
    assert tokens_of(events, 3) == [one["token_ids"] for one in whole["choices"]]
    roles = [choice["index"] for choice in choices_in(events) if choice["delta"].get("role") == "assistant"]
    assert sorted(roles) == [0, 1, 2], "one for each choice"
    heard: set[int] = set()
    for choice in choices_in(events):
        assert "role" in choice["delta"] or choice["index"] in heard, "before anything else of its choice"
        heard.add(choice["index"])
    last = events[-2].data
    assert last["choices"] == [] and last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert {event.data["usage"]["prompt_tokens"] for event in events[:-1]} == {whole["usage"]["prompt_tokens"]}
    ends = {choice["index"]: choice["seed"] for choice in choices_in(events) if choice["finish_reason"]}
    assert ends == {one["index"]: one["seed"] for one in whole["choices"]}


def test_a_stream_goes_on_behind_any_event(gateway: RunningGateway, worker: PlayedWorker) -> None:
    """A stream of choices goes on by the same POST and key, or by GET, with the roles that its client still lacks."""
    body: dict[str, Any] = {"messages": MESSAGES, "n": 2, "seed": 5, "return_token_ids": True, "stream": True}
    key = {"Idempotency-Key": "k"}
    with answering(worker, by_seed), gateway.http.stream("POST", CHAT, json=body, headers=key) as response:
        events = list(read_events(response))

    def check_whole(pieces: list[Event]) -> None:
        assert tokens_of(pieces, 2) == tokens_of(events, 2), "whichever choice comes first"
        roles = [choice["index"] for choice in choices_in(pieces) if "role" in choice["delta"]]
        assert sorted(roles) == [0, 1]
        assert sum(1 for choice in choices_in(pieces) if choice["finish_reason"]) == 2

    for at, event in enumerate(events[:-1], start=1):
        assert event.id is not None
        behind = {"Last-Event-ID": event.id}
        with gateway.http.stream("POST", CHAT, json=body, headers=key | behind) as response:
            check_whole(events[:at] + list(read_events(response)))
        url = f"/v1/requests/{event.data['id']}/events?return_token_ids=true"
        with gateway.http.stream("GET", url, headers=behind) as response:
            check_whole(events[:at] + list(read_events(response)))
    wrong = gateway.http.post(CHAT, json=body, headers=key | {"Last-Event-ID": "1"})
    assert wrong.status_code == 400 and "2 choices" in wrong.json()["error"]["message"]
    other = gateway.http.post(CHAT, json=body | {"n": 3}, headers=key)
    assert other.status_code == 422, "another body"


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_choices_run_in_the_background_and_end_together(
    gateway: RunningGateway, worker: PlayedWorker, path: str
) -> None:
    what: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": ["a", "b"]}
    answer = gateway.post(path, **what, n=2, seed=4, background=True)
    assert answer.status_code == 202
    name = answer.json()["id"]
    listed = gateway.http.get(f"/v1/requests/{name}").json()
    choices = listed["choices"]
    assert len(choices) == len(set(choices)) == (2 if path == CHAT else 4)
    claimed = worker.claim(len(choices))
    for one in claimed:
        worker.say(one, [one.body.params["seed"] % 200 + 5])

    def shown(choice: str) -> dict[str, Any]:
        return gateway.http.get(f"/v1/requests/{choice}").json()

    assert [shown(one)["seed"] for one in choices] == [one.body.params["seed"] for one in claimed]
    assert all(shown(one)["token_ids"] == [shown(one)["seed"] % 200 + 5] for one in choices)
    assert gateway.http.delete(f"/v1/requests/{choices[1]}").status_code == 200
    assert [shown(one)["status"] == "cancelled" for one in choices[:2]] == [False, True], "one alone"
    assert gateway.http.delete(f"/v1/requests/{name}").status_code == 200
    assert {shown(one)["status"] for one in choices} == {"cancelled"}


def test_choices_are_cancelled_when_their_client_leaves(gateway: RunningGateway, worker: PlayedWorker) -> None:
    with gateway.http.stream("POST", "/v1/completions", json={"prompt": "x", "n": 3, "stream": True}) as response:
        claimed = worker.claim(3)
        for one in claimed:
            worker.say(one, [5])
        next(response.iter_lines())
    wait_until(
        lambda: {worker.record(one.request_id).get(b"end") for one in claimed} == {b"cancelled"}, "all are cancelled"
    )

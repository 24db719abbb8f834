"""Tools in a drill: answers are cut into calls without the gateway's help, and chats are sent as records say."""

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.sampling_params import SamplingParams, derive_seed
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_gateway.api.openai.answer_parts import message_of
from blockrelay_gateway.api.openai.tools.formats import FORMS
from blockrelay_launcher.client.resuming import Refused
from blockrelay_launcher.drill.chats import Call, CutText, cut
from blockrelay_launcher.drill.workload import DrillRequest, Numerics, References, learn, make_requests

HERMES = '<tool_call>\n{"name": "a-b", "arguments": {"x": "}\\"{"}}\n</tool_call>'
LLAMA = '{"name": "f", "parameters": {"x": [1, {"y": 2}]}}'
MISTRAL = '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"n": 1}}]'
ARGS = '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{"y": "[ARGS]"}'


@pytest.mark.parametrize(
    ("form", "text", "found"),
    [
        ("hermes", HERMES, CutText("", (Call("a-b", '{"x": "}\\"{"}'),), True)),
        ("hermes", f"Once. \n{HERMES}\n{HERMES}", CutText("Once.", (Call("a-b", '{"x": "}\\"{"}'),) * 2, True)),
        ("hermes", "Once upon <tool", CutText("Once upon <tool", ())),
        ("hermes", 'Once <tool_call>\n{"name": "a', CutText("Once", ())),
        ("hermes", HERMES[:49], CutText("", (Call("a-b", '{"x": "}'),))),
        ("llama", f"{LLAMA}; {LLAMA}", CutText("", (Call("f", '{"x": [1, {"y": 2}]}'),) * 2, True)),
        ("llama", f"<|python_tag|>{LLAMA}", CutText("", (Call("f", '{"x": [1, {"y": 2}]}'),), True)),
        ("llama", "Once {", CutText("Once {", ())),
        ("mistral", MISTRAL, CutText("", (Call("f", "{}"), Call("g", '{"n": 1}')), True)),
        ("mistral_args", ARGS, CutText("", (Call("f", '{"x": 1}'), Call("g", '{"y": "[ARGS]"}')), True)),
    ],
)
def test_a_text_is_cut_into_what_precedes_its_calls_and_the_calls(form: str, text: str, found: CutText) -> None:
    assert cut(text, form) == found


@pytest.mark.parametrize(("form", "text"), [("hermes", f"A \n{HERMES}"), ("llama", LLAMA), ("mistral", MISTRAL)])
def test_gateways_cut_every_beginning_of_it_in_the_same_way(form: str, text: str) -> None:
    assert form in FORMS
    for length in range(len(text) + 1):
        own = cut(text[:length], form)
        message, ends = message_of(text[:length], form, "", "req-1")
        calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())]
        assert [tuple(call) for call in own.calls] == calls and own.ends_with_call == ends, text[:length]
        if not text[:length].endswith(" "):  # a gateway holds blanks back that calls may follow
            assert own.content == (message["content"] or ""), text[:length]


def record(**fields: Any) -> RequestBody:
    params = SamplingParams(max_tokens=4, grammar='start: "x"').to_dict()
    return replace(RequestBody(prompt=np.array([5, 6], np.int32), params=params, calls="hermes"), **fields)


@pytest.fixture(scope="module")
def requests() -> list[DrillRequest]:
    return make_requests(60, rng=Random(3), folder=open_block_folder(BUNDLED_MODEL, blocks=[]))


def test_every_kind_of_request_is_among_them_and_each_choice_is_a_request_that_can_be_sent_alone(
    requests: list[DrillRequest],
) -> None:
    chats = [one for one in requests if one.chat]
    assert {one.path for one in chats} == {"/v1/chat/completions"} and all(one.body()["tools"] for one in chats)
    assert any(one.cuts for one in requests) and any(one.params.grammar and not one.chat for one in requests)
    several = [one for one in requests if one.others]
    assert len(requests) == 60
    assert {one.body()["n"] for one in several} == {2, 3} and any(one.chat for one in several)
    for one in several:
        for index, other in enumerate(one.others, 1):
            seed = derive_seed(f"{one.params.seed}:{index}")
            alone = requests[other]
            assert alone == replace(one, params=replace(one.params, seed=seed), others=())
            assert "n" not in alone.body() and alone.body()["seed"] == seed


def test_chats_get_the_prompt_and_the_grammar_of_their_records_and_are_sent_as_before(
    requests: list[DrillRequest],
) -> None:
    learned, asked = list(requests), list[DrillRequest]()

    def record_of(one: DrillRequest) -> RequestBody:
        asked.append(one)
        return record(shown=(7,))

    assert learn(learned, record_of, only_chats=True) == {} and asked == [one for one in requests if one.chat]
    for before, one in zip(requests, learned, strict=True):
        assert one.body() == before.body() and (one == before) == (one.chat is None)
        if one.chat:
            assert (one.prompt, one.params.grammar, one.chat.shown) == ((5, 6), 'start: "x"', (7,))
    again = list(learned)
    assert learn(again, record_of, only_chats=True) == {} and again == learned
    other = learn(again, lambda one: record(), only_chats=True)
    assert set(other) >= {number for number, one in enumerate(requests) if one.chat}, "another release says otherwise"


@pytest.mark.parametrize("fields", [{"reasoning": "may_begin"}, {"calls": "xml"}, {"calls": ""}])
def test_a_chat_that_cannot_be_judged_is_left_out(requests: list[DrillRequest], fields: dict[str, Any]) -> None:
    chats = [number for number, one in enumerate(requests) if one.chat]
    assert sorted(learn(list(requests), lambda one: record(**fields), only_chats=True)) == chats


def test_what_a_release_refuses_is_left_out_with_the_bodies_that_have_it_as_a_choice(
    requests: list[DrillRequest],
) -> None:
    first = next(number for number, one in enumerate(requests) if one.others and not one.chat)

    def record_of(one: DrillRequest) -> RequestBody:
        if one == requests[requests[first].others[-1]]:
            raise Refused(400, "what is that?")
        return record()

    found = learn(list(requests), record_of, only_chats=False)
    assert set(found) == {first, requests[first].others[-1]} and "what is that?" in found[first]


def test_the_right_answer_to_a_chat_has_calls_that_follow_the_grammar_of_its_record() -> None:
    folder = open_block_folder(BUNDLED_MODEL, blocks=[])
    chat = next(one for one in make_requests(2, rng=Random(1), folder=folder) if one.chat)
    rules = 'start: "<tool_call>\\n{\\"name\\": \\"f\\", \\"arguments\\": {\\"x\\": " /[0-9]{3}/ "}}\\n</tool_call>"'
    params = SamplingParams(max_tokens=60, grammar=rules).to_dict()
    asks = [replace(chat, params=replace(chat.params, max_tokens=60), others=())]
    assert not learn(asks, lambda one: record(params=params), only_chats=True)
    references = References(models=[BUNDLED_MODEL], requests=asks, ids={"own": Numerics()})
    references.prepare([(0, "own")])
    answer = references.answer(0, "own")
    assert answer is not None and answer.finish_reason == "tool_calls" and answer.content == ""
    ((name, arguments),) = answer.calls
    assert name == "f" and arguments in answer.text and len(arguments) == len('{"x": 123}')

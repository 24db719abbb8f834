"""Names that derive from keys, bodies told apart, event ids."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockrelay.errors import BadRequest
from blockrelay.protocol.encoding.request_ids import sibling
from blockrelay_gateway.admission.idempotency import Identity, identify, random_identity
from blockrelay_gateway.api.openai.schemas import CompletionRequest
from blockrelay_gateway.streaming.event_ids import event_id, parse_event_id

KEYS = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=255)


def who(
    key: str | None = "k",
    body: Mapping[str, Any] = MappingProxyType({}),
    *,
    tenant: str = "",
    secret: str = "",
    route: str = "completion",
) -> Identity:
    request = CompletionRequest.model_validate({"prompt": "Tom", **body})
    return identify([] if key is None else [key], request, tenant=tenant, route=route, model="m", secret=secret)


@given(KEYS, KEYS)
def test_one_key_is_one_name_and_two_keys_are_two(one: str, other: str) -> None:
    assert who(one) == who(one)
    assert (who(one).base == who(other).base) == (one == other)


@given(KEYS, KEYS, KEYS, KEYS)
def test_a_tenant_cannot_name_the_requests_of_another(key: str, tenant: str, other_key: str, other: str) -> None:
    same = (key, tenant) == (other_key, other)
    assert (who(key, tenant=tenant).base == who(other_key, tenant=other).base) == same


def test_a_secret_makes_names_that_nobody_guesses() -> None:
    assert len({who().base, who(secret="a").base, who(secret="b").base}) == 3
    assert who().fingerprint == who(secret="a").fingerprint


def test_without_a_key_every_name_is_new() -> None:
    assert who(None).base != who(None).base and who(None).fingerprint == ""


@given(st.dictionaries(st.sampled_from(["max_tokens", "seed", "top_k"]), st.integers(0, 9)))
def test_a_body_is_what_it_says_not_how_it_is_written(fields: dict[str, int]) -> None:
    text = json.dumps({"prompt": "Tom", **fields, "stop": None}, indent=3)
    backwards = dict(reversed(json.loads(text).items()))
    assert who(body=fields).fingerprint == who(body=backwards).fingerprint
    assert who(body=fields).fingerprint != who(body={**fields, "temperature": 0.5}).fingerprint


@pytest.mark.parametrize("more", [{"stream": True}, {"return_token_ids": True}, {"model": "m"}])
def test_a_retry_may_ask_for_another_way_of_delivery(more: dict[str, Any]) -> None:
    assert who(body=more) == who()


def test_another_route_or_prompt_is_another_body_under_the_same_name() -> None:
    bodies: list[dict[str, Any]] = [{"prompt": "Tim"}, {"prompt": ["Tom"]}, {"background": True}]
    for other in (who(route="chat"), *(who(body=body) for body in bodies)):
        assert other.base == who().base and other.fingerprint != who().fingerprint


@pytest.mark.parametrize("key", ["", "x" * 256, "ä", "tab\there", "\x7f"])
def test_what_is_no_key_is_refused_by_the_name_of_its_header(key: str) -> None:
    with pytest.raises(BadRequest) as refused:
        who(key)
    assert refused.value.param == "Idempotency-Key"


def test_several_keys_are_none() -> None:
    with pytest.raises(BadRequest):
        identify(["a", "a"], CompletionRequest(prompt="x"), tenant="", route="completion", model="m")


def test_prompts_of_one_body_are_named_after_the_first() -> None:
    names = who().names(3)
    assert [name.request_id for name in names] == [sibling(who().base, index) for index in range(3)]
    assert len({name.request_id for name in names}) == 3 and {name.group for name in names} == {names[0].request_id}
    assert [name.choices for name in names] == [3, 1, 1]
    (alone,) = who().names()
    assert (alone.request_id, alone.group, alone.choices) == (who().base, "", 1)


@given(st.lists(st.integers(0, 10**9 - 1), min_size=1, max_size=128))
def test_an_event_id_says_how_far_a_reader_is_in_each_log(positions: list[int]) -> None:
    request_id = random_identity().base
    text = event_id(request_id, positions)
    assert parse_event_id(text, request_id, param="x") == tuple(positions)
    assert parse_event_id(text.partition(":")[2], request_id, param="x") == tuple(positions)
    with pytest.raises(BadRequest, match="another request"):
        parse_event_id(text, random_identity().base, param="x")


@given(st.text(max_size=20))
def test_nothing_else_is_an_event_id(text: str) -> None:
    try:
        positions = parse_event_id(text, "req-" + "0" * 24, param="x")
    except BadRequest as error:
        assert error.param == "x"
    else:
        assert text == ".".join(
            part.zfill(len(given)) for part, given in zip(map(str, positions), text.split("."), strict=True)
        )

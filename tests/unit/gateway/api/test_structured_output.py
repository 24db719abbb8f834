"""The fields that ask for structured output, in the spellings of OpenAI, vLLM and llama.cpp."""

import json
import re
from typing import Any

import pytest

from blockrelay.errors import BadRequest
from blockrelay.protocol.messages import RequestBody
from blockrelay_gateway.api.openai.requests import OpenAIRequests
from blockrelay_gateway.api.openai.schemas import CompletionRequest
from blockrelay_gateway.api.schema_formats import PATTERNS, with_patterns
from blockrelay_gateway.api.structured_output import MAX_BYTES, StructuredOutput
from tests.support.gateway.openai_requests import complete

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


def nested(levels: int) -> dict[str, Any]:
    """A schema of lists in lists, which may be deeper than recursion goes."""
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


#: Spellings of one wish.
SCHEMAS: dict[str, dict[str, Any]] = {
    "OpenAI": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "llama.cpp's response_format": {"response_format": {"type": "json_object", "schema": SCHEMA}},
    "llama.cpp": {"json_schema": SCHEMA},
    "vLLM": {"structured_outputs": {"json": SCHEMA}},
    "vLLM, as text": {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    "older vLLM": {"guided_json": SCHEMA},
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "any object": {"response_format": {"type": "json_object"}},
    "vLLM's any object": {"structured_outputs": {"json_object": True}},
    "regex": {"structured_outputs": {"regex": "[0-9]{3}"}},
    "older regex": {"guided_regex": "[0-9]{3}"},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "older choice": {"guided_choice": ["yes", 'a "quoted" one\n']},
    "Lark": {"structured_outputs": {"grammar": 'start: "a" | "b"'}},
    "GBNF": {"grammar": 'root ::= "a" | [b-d]+'},
    "older grammar": {"guided_grammar": 'start: "a"'},
    "a schema for anything": {"structured_outputs": {"json": True}},
}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no type": ({"response_format": {}}, "response_format.type"),
    "another type": ({"response_format": {"type": "xml"}}, "response_format.type"),
    "a type that is nested": ({"response_format": {"type": nested(2000)}}, "response_format.type"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    "a schema that is a list": ({"guided_json": []}, "guided_json"),
    "a schema that is no JSON": ({"guided_json": "{"}, "guided_json"),
    "a schema for nothing": ({"guided_json": False}, "guided_json"),
    "a keyword that is not supported": ({"guided_json": {"not": {}}}, "guided_json"),
    "too deep": ({"guided_json": nested(70)}, "guided_json"),
    "too large": ({"guided_json": {"enum": ["x" * 100] * 700}}, "guided_json"),
    "half of a surrogate pair": ({"guided_regex": "\ud800"}, "guided_regex"),
    "half of a surrogate pair in a schema": ({"guided_json": {"const": "\ud800"}}, "guided_json"),
    "a number that JSON does not have": ({"guided_json": {"type": "number", "minimum": float("nan")}}, "guided_json"),
    "a switch of the library's": ({"guided_json": {"x-guidance": {"lenient": True}, "not": {}}}, "guided_json"),
    "a schema that contains itself": ({"json_schema": {"$ref": "#"}}, "json_schema"),
    "a reference to another host": ({"json_schema": {"$ref": "http://example.com/a"}}, "json_schema"),
    "an empty regex": ({"guided_regex": ""}, "guided_regex"),
    "a wrong regex": ({"guided_regex": "("}, "guided_regex"),
    "no choices": ({"guided_choice": []}, "guided_choice"),
    "an empty choice": ({"guided_choice": [""]}, "guided_choice"),
    "too many choices": ({"guided_choice": ["a"] * 1025}, "guided_choice"),
    "a wrong grammar": ({"grammar": "start: nothing"}, "grammar"),
    "a token by its number": ({"grammar": "start: <[5]>"}, "grammar"),
    "two at once": ({"guided_choice": ["a"], "grammar": 'start: "a"'}, "grammar"),
    "two in one": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    "with ignore_eos": ({"grammar": 'start: "a"', "ignore_eos": True}, "ignore_eos"),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_all_spellings_make_one_grammar(requests: OpenAIRequests, name: str) -> None:
    asked, usual = complete(requests, **SCHEMAS[name]), complete(requests, **SCHEMAS["OpenAI"])
    assert asked.params.grammar == usual.params.grammar != ""
    assert asked.body.grammar_id == usual.body.grammar_id != ""
    decoded = RequestBody.decode(asked.body.encode())
    assert (decoded.grammar_id, decoded.params["grammar"]) == (asked.body.grammar_id, asked.params.grammar)


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds(requests: OpenAIRequests, name: str) -> None:
    assert complete(requests, **OTHERS[name]).params.grammar


PLAIN = [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"grammar": ""}]


@pytest.mark.parametrize("neutral", PLAIN)
def test_requests_for_plain_text_have_no_grammar(requests: OpenAIRequests, neutral: dict[str, Any]) -> None:
    asked = complete(requests, **neutral)
    assert (asked.params.grammar, asked.body.grammar_id) == ("", "")


@pytest.mark.parametrize("name", WRONG)
def test_wrong_ones_are_refused_by_name(requests: OpenAIRequests, name: str) -> None:
    fields, param = WRONG[name]
    with pytest.raises(BadRequest) as refused:
        complete(requests, **fields)
    assert refused.value.param == param
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_without_the_library_the_answer_names_it(requests: OpenAIRequests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockrelay.text.grammars.is_installed", lambda: False)
    builder = requests.builder
    bare = StructuredOutput.of(builder.tokenizer, builder.model)
    assert not bare.is_available
    with pytest.raises(BadRequest, match=r"pip install 'blockrelay\[structured\]'"):
        bare.grammar_of(CompletionRequest(prompt="a", guided_choice=["a"]))


def test_the_limit_counts_bytes(requests: OpenAIRequests) -> None:
    with pytest.raises(BadRequest, match=str(MAX_BYTES)):
        complete(requests, guided_regex="ä" * (MAX_BYTES // 2 + 1))


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ("date", ("2024-02-29", "2000-02-29", "1999-12-31"), ("2021-02-29", "1900-02-29", "2024-04-31", "2024-00-10")),
        ("time", ("00:00:00Z", "23:59:59.5+01:00"), ("24:00:00Z", "22:59:60Z", "10:00Z", "10:00:00")),
        ("date-time", ("2024-02-29T12:00:00Z",), ("2023-02-29T12:00:00Z", "2024-01-01 12:00:00Z")),
    ],
)
def test_dates_are_those_of_the_calendar(form: str, right: tuple[str, ...], wrong: tuple[str, ...]) -> None:
    assert all(re.search(PATTERNS[form], text) for text in right)
    assert not any(re.search(PATTERNS[form], text) for text in wrong)


@pytest.mark.parametrize("name", ["default", "const", "enum", "examples", "properties", "format"])
def test_a_property_may_have_the_name_of_a_keyword(name: str) -> None:
    date, changed = {"type": "string", "format": "date"}, {"type": "string", "pattern": PATTERNS["date"]}
    assert with_patterns({"properties": {name: date}}) == {"properties": {name: changed}}


def test_formats_become_patterns_only_where_they_are_keywords() -> None:
    schema = {
        "properties": {"format": {"type": "string", "format": "date"}, "b": {"const": {"format": "date"}}},
        "anyOf": [{"format": "time", "pattern": "^1"}, {"format": "uuid"}],
    }
    assert with_patterns(schema) == {
        "properties": {"format": {"type": "string", "pattern": PATTERNS["date"]}, "b": {"const": {"format": "date"}}},
        "anyOf": [{"pattern": "^1", "allOf": [{"pattern": PATTERNS["time"]}]}, {"format": "uuid"}],
    }

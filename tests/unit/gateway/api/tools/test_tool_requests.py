"""What a chat may say about tools, and what it is refused for."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockrelay.errors import BadRequest
from blockrelay.protocol.messages import RequestBody
from blockrelay_gateway.api.openai.chat_template import ChatTemplate
from blockrelay_gateway.api.openai.requests import OpenAIRequests
from blockrelay_gateway.api.openai.tools.formats import HERMES, form_named
from blockrelay_gateway.api.structured_output import StructuredOutput
from tests.support.gateway.openai_requests import chat

OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}


def deep() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(70):
        schema = {"type": "array", "items": schema}
    return schema


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def arguments(name: str = "f", text: str = "{}") -> list[dict[str, Any]]:
    call = {"id": "a", "type": "function", "function": {"name": name, "arguments": text}}
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]


NAMED = {"type": "function", "function": {"name": "f"}}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "two of one name": ({"tools": [tool(), tool("g"), tool()]}, "tools.2.function.name"),
    "a name with a space": ({"tools": [tool("f g")]}, "tools.0.function.name"),
    "a name that is too long": ({"tools": [tool("f" * 65)]}, "tools.0.function.name"),
    "no function": ({"tools": [{"type": "function"}]}, "tools.0.function"),
    "another kind of tool": ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    "an unknown field": ({"tools": [tool(color="red")]}, "tools.0.function.color"),
    "too many": ({"tools": [tool(f"f{index}") for index in range(129)]}, "tools"),
    "required without tools": ({"tool_choice": "required"}, "tool_choice"),
    "a function without tools": ({"tools": [], "tool_choice": NAMED}, "tool_choice"),
    "a function that is none of the tools": ({"tools": [tool("g")], "tool_choice": NAMED}, "tool_choice"),
    "an unknown choice": ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
    "a choice without a name": ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
    "parameters that are a list": ({"tools": [tool(parameters=[])]}, "tools.0.function.parameters"),
    "arguments that are no object": ({"tools": [tool(parameters={"type": "array"})]}, "tools.0.function.parameters"),
    "an impossible schema": (
        {"tools": [tool("g"), tool(parameters={"type": "object", "not": {}})]}, "tools.1.function.parameters"
    ),
    "a schema that is too deep": (
        {"tools": [tool(parameters={"properties": {"a": deep()}})]}, "tools.0.function.parameters"
    ),
    "a schema that is too deep, of a function that is not called": (
        {"tools": [tool(), tool("g", parameters=deep())], "tool_choice": NAMED}, "tools.1.function.parameters"
    ),
    "half of a surrogate pair": (
        {"tools": [tool(parameters={"properties": {"\ud800": {}}})]}, "tools.0.function.parameters"
    ),
    "a schema that is too large": (
        {"tools": [tool(parameters={"properties": {"a": {"enum": ["x" * 100] * 700}}})]}, "tools.0.function.parameters"
    ),
    "schemas that are too large together": (
        {"tools": [tool(f"f{n}", parameters={"properties": {"a": {"enum": ["x" * 900]}}}) for n in range(80)]}, "tools"
    ),
    "a choice beside tools": ({"tools": [tool()], "guided_choice": ["a"]}, "guided_choice"),
    "an impossible answer beside tools": (
        {"tools": [tool()], "guided_json": {"type": "string", "minLength": 2, "maxLength": 1}}, "guided_json"
    ),
    "calls that are to go on": (
        {"messages": arguments(), "continue_final_message": True, "add_generation_prompt": False},
        "continue_final_message",
    ),
    "with ignore_eos": ({"tools": [tool()], "ignore_eos": True}, "ignore_eos"),
    "arguments that are no JSON": (
        {"messages": arguments(text="{")}, "messages.1.tool_calls.0.function.arguments"
    ),
    "arguments that are a list": (
        {"messages": arguments(text="[1]")}, "messages.1.tool_calls.0.function.arguments"
    ),
    "calls of a user": (
        {"messages": [{**arguments()[1], "role": "user", "content": "x"}]}, "messages.0.tool_calls"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_ones_are_refused_by_name(requests: OpenAIRequests, name: str) -> None:
    fields, param = WRONG[name]
    with pytest.raises(BadRequest) as refused:
        chat(requests, **fields)
    assert refused.value.param == param
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_a_record_says_how_the_answer_calls_tools(requests: OpenAIRequests) -> None:
    body = chat(requests, tools=[tool()]).body
    assert (body.calls, body.shown) == ("hermes", ()) and body.grammar_id
    assert RequestBody.decode(body.encode()).calls == "hermes"
    assert RequestBody.decode(replace(body, shown=(7, 9)).encode()).shown == (7, 9)


@pytest.mark.parametrize("fields", [{"tools": []}, {"tools": [tool()], "tool_choice": "none"}, {"tool_choice": "auto"}])
def test_without_tools_to_call_there_is_no_grammar(requests: OpenAIRequests, fields: dict[str, Any]) -> None:
    asked, plain = chat(requests, **fields), chat(requests)
    assert (asked.params.grammar, asked.body.calls) == ("", "")
    assert asked.body.prompt.tolist() == plain.body.prompt.tolist(), "tools are not shown"


def test_one_function_is_the_only_one_in_the_grammar(requests: OpenAIRequests) -> None:
    tools = [tool("other"), tool(parameters=OBJECT)]
    asked = chat(requests, tools=tools, tool_choice=NAMED)
    assert "other" not in asked.params.grammar and ")*" not in asked.params.grammar
    auto = chat(requests, tools=tools)
    assert auto.body.prompt.tolist() == asked.body.prompt.tolist(), "the model sees all of them"


def test_a_function_takes_what_it_declares(requests: OpenAIRequests) -> None:
    def schema(**fields: Any) -> dict[str, Any]:
        grammar = chat(requests, tools=[tool(**fields)]).params.grammar
        (line,) = [line for line in grammar.splitlines() if line.startswith("arguments_0: %json ")]
        found = json.loads(line.partition("%json ")[2])
        del found["x-guidance"]
        return found

    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    assert schema() == nothing
    assert schema(parameters=OBJECT, strict=True) == {**OBJECT, "additionalProperties": False}
    assert schema(parameters={"type": "object"}) == {"type": "object"}, "it takes anything"
    anything = {**OBJECT, "additionalProperties": True}
    assert schema(parameters=anything) == anything
    said = {"title": "T", "description": "d", "properties": {"description": {"type": "string", "description": "d"}}}
    assert schema(parameters=said)["properties"] == {"description": {"type": "string"}}, "prose costs nothing"


def test_without_the_library_the_answer_names_it(requests: OpenAIRequests) -> None:
    bare = OpenAIRequests(replace(requests.builder, structured=StructuredOutput(None)), requests.template)
    with pytest.raises(BadRequest) as refused:
        chat(bare, tools=[tool()])
    assert refused.value.param in ("tools", "tools.0.function.parameters")
    assert chat(bare, tools=[tool()], tool_choice="none")


def test_json_may_be_asked_for_beside_tools(requests: OpenAIRequests) -> None:
    form = {"response_format": {"type": "json_object"}}
    either = chat(requests, tools=[tool()], **form)
    assert either.body.calls == "hermes or json" and form_named(either.body.calls) == HERMES.beside_json()
    assert form_named("hermes") == HERMES and form_named("") is None
    # Answers that must call are calls alone.
    called = chat(requests, tools=[tool()], tool_choice="required")
    assert chat(requests, tools=[tool()], tool_choice="required", **form).params.grammar == called.params.grammar
    assert chat(requests, tools=[tool()], tool_choice="none", **form).body.calls == ""
    llama = (Path(__file__).parent / "templates" / "llama.jinja").read_text()
    with pytest.raises(BadRequest, match="begin as JSON does") as refused:
        chat(replace(requests, template=ChatTemplate(llama)), tools=[tool()], **form)
    assert refused.value.param == "response_format"

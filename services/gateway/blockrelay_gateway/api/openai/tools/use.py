"""What a chat request says about tools: which functions there are, and whether the answer calls them. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from blockrelay.errors import BadRequest
from blockrelay.text.grammars import Grammars
from blockrelay_gateway.api.openai.schemas import ChatRequest
from blockrelay_gateway.api.openai.tools.formats import CallForm
from blockrelay_gateway.api.openai.tools.grammar import grammar_of_calls
from blockrelay_gateway.api.openai.tools.schemas import Function, Tool
from blockrelay_gateway.api.structured_output import StructuredOutput, check_depth, check_size

#: Most tools of a request.
MAX_TOOLS = 128
#: What a function without parameters takes.
_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
#: Keywords beside which `properties` do not name all that there is.
_OPEN = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools that an answer may, or must, call."""

    shown: tuple[Mapping[str, Any], ...]
    """All tools, as chat templates get them."""
    functions: Mapping[str, str]
    """JSON schemas of the arguments of functions that may be called, by the function's name."""
    required: bool
    """The answer is a call, without text before it."""
    several: bool
    """More than one call is allowed."""
    answer: str = ""
    """JSON schema of an answer that is no call; "": it may be any text."""

    @property
    def lets_text_begin(self) -> bool:
        """Whether the answer may begin with any text."""
        return not (self.required or self.answer)

    def form_of(self, shown: CallForm) -> CallForm:
        """Returns the form of the answer's calls for a model whose template has the form `shown`.

        Raises BadRequest if JSON and calls begin alike in it.
        """
        if not self.answer:
            return shown
        if shown.braced:
            message = "response_format beside tools: calls of this model begin as JSON does; send tool_choice none"
            raise BadRequest(message, param="response_format")
        return shown.beside_json()

    def grammar(self, form: CallForm, structured: StructuredOutput, *, several: bool) -> tuple[str, str]:
        """Returns the grammar of the answer with calls in `form`, and the id of workers that read it.

        Without `several` the chat template takes one call a message.
        Raises BadRequest if it is too large, or the service cannot make grammars.
        """

        def make(grammars: Grammars) -> str:
            many = several and self.several
            text = grammar_of_calls(
                form, self.functions, grammars, required=self.required, several=many, answer=self.answer
            )
            return check_size(text, "tools")

        return structured.made(make, "tools")


def tool_use(request: ChatRequest, structured: StructuredOutput) -> ToolUse | None:
    """Returns what a request's `tools`, `tool_choice` and `parallel_tool_calls` say; None: no tool may be called.

    Raises BadRequest, with the field, for what cannot be done.
    """
    tools = request.tools or []
    shown = shown_tools(tools)
    choice = _choice(request.tool_choice)
    if choice not in ("none", "auto") and not tools:
        raise BadRequest("tool_choice asks for a call, and there are no tools", param="tool_choice")
    if choice == "none" or not tools:
        return None
    named = choice if isinstance(choice, _Named) else None
    if named and all(tool.function.name != named.name for tool in tools):
        raise BadRequest(f"tool_choice names {named.name[:64]!r}, which is none of the tools", param="tool_choice")
    functions = {
        tool.function.name: _arguments(tool.function, structured, f"tools.{index}.function.parameters")
        for index, tool in enumerate(tools)
        if named is None or tool.function.name == named.name
    }
    required, answer = choice != "auto", structured.json_beside_tools(request)
    return ToolUse(
        shown=shown,
        functions=functions,
        required=required,
        answer="" if required else answer,
        several=named is None and request.parallel_tool_calls is not False,
    )


def shown_tools(tools: Sequence[Tool]) -> tuple[Mapping[str, Any], ...]:
    """Returns tools as chat templates get them.

    Raises BadRequest, with the field, for too many, two of one name, and parameters that are nested too deep to write.
    """
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"tools takes at most {MAX_TOOLS} tools, not {len(tools)}", param="tools")
    places: dict[str, int] = {}
    for index, tool in enumerate(tools):
        if (first := places.setdefault(tool.function.name, index)) != index:
            message = f"tools: {tool.function.name!r} is the name of both {first} and {index}"
            raise BadRequest(message, param=f"tools.{index}.function.name")
        check_depth(tool.function.parameters, f"tools.{index}.function.parameters")
    return tuple({"type": "function", "function": _shown(tool.function)} for tool in tools)


@dataclass(frozen=True, slots=True)
class _Named:
    """A `tool_choice` of one function."""

    name: str


def _choice(value: object) -> str | _Named:
    """Returns a checked `tool_choice`. Raises BadRequest."""
    if value is None:
        return "auto"
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    fields = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    function = fields.get("function")
    name = cast(dict[str, Any], function).get("name") if isinstance(function, dict) else None
    if fields.get("type") != "function" or not isinstance(name, str):
        message = 'tool_choice must be none, auto, required or {"type": "function", "function": {"name": ...}}'
        raise BadRequest(message, param="tool_choice")
    return _Named(name)


def _shown(function: Function) -> dict[str, Any]:
    """Returns a function as chat templates get it, with its fields in the order of transformers."""
    fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {name: value for name, value in fields.items() if value is not None}


def _arguments(function: Function, structured: StructuredOutput, param: str) -> str:
    """Returns the JSON schema of a function's arguments as text. Raises BadRequest unless some object fits it.

    `parameters` that are nested too deep were refused before.
    """
    schema = _NOTHING if function.parameters is None else function.parameters
    if schema.get("type", "object") != "object":
        raise BadRequest(f"{param}: arguments are an object, not {json.dumps(schema['type'])[:40]}", param=param)
    closed = {"additionalProperties": False} if "properties" in schema and not _OPEN & schema.keys() else {}
    return structured.json_grammar({**_without_prose(schema), "type": "object", **closed}, param)


def _without_prose(schema: Any) -> Any:
    """Returns a JSON schema without the texts that only people and models read; `schema` stays as it is."""
    if isinstance(schema, list):
        return [_without_prose(one) for one in cast(list[object], schema)]
    if not isinstance(schema, dict):
        return schema
    fields = cast(dict[str, object], schema)
    prose = ("description", "title", "$comment")
    return {
        name: value if name in ("const", "enum") else _without_prose(value)
        for name, value in fields.items()
        if not (name in prose and isinstance(value, str))
    }

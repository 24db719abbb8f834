"""How tools, calls and their results reach a chat template. Pure.

A template that shows tools gets them as transformers gives them. Others get texts: the words with which Qwen 2.5
describes tools, and calls and results between the tags that these words name.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from blockrelay.errors import BadRequest
from blockrelay_gateway.api.openai.tools.answers import ID_LENGTH, call_id
from blockrelay_gateway.api.openai.tools.formats import HERMES, MISTRAL, MISTRAL_ARGS, CallForm
from blockrelay_gateway.api.openai.tools.schemas import ToolCall

_DESCRIPTION = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def call_of(call: ToolCall, param: str) -> dict[str, Any]:
    """Returns a call of an assistant's message as templates get it: with its arguments as an object.

    Raises BadRequest, with the field, for arguments that are no JSON object. An empty text stands for no arguments.
    """
    name = f"{param}.function.arguments"
    try:
        arguments: object = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise BadRequest(f"{name} must be the text of a JSON object", param=name)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def with_names(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns `messages` where results of calls have the function's name, which some templates demand."""
    names: dict[str, str] = {}
    found = list[Mapping[str, Any]]()
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        name = names.get(message.get("tool_call_id", ""))
        found.append({"name": name, **message} if name is not None and message["role"] == "tool" else message)
    return found


def with_fitting_ids(messages: Sequence[Mapping[str, Any]], form: CallForm) -> list[Mapping[str, Any]]:
    """Returns `messages` with ids of calls that a template of the `form` takes: Mistral's take nine letters only."""
    if form not in (MISTRAL, MISTRAL_ARGS):
        return list(messages)

    def fitting(name: str) -> str:
        return name if len(name) == ID_LENGTH and name.isascii() and name.isalnum() else call_id(name, 0)

    found = list[Mapping[str, Any]]()
    for message in messages:
        changed = dict(message)
        if "tool_call_id" in changed:
            changed["tool_call_id"] = fitting(changed["tool_call_id"])
        if "tool_calls" in changed:
            changed["tool_calls"] = [{**call, "id": fitting(call["id"])} for call in changed["tool_calls"]]
        found.append(changed)
    return found


def as_texts(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, has_system: bool
) -> list[Mapping[str, Any]]:
    """Returns `messages` for a template that shows no tools: calls and their results, and `tools`, are texts.

    The tools are described behind the system's text, or without `has_system` (the template shows no message of the
    system) before the first message.
    """
    found = list[Mapping[str, Any]]()
    answered = False
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{_text(message)}\n</tool_response>"
            if answered:
                found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n{result}"}
            else:
                found.append({"role": "user", "content": result})
        elif calls := message.get("tool_calls"):
            texts = [_text(message), *map(_call, calls)]
            found.append({"role": message["role"], "content": "\n".join(text for text in texts if text)})
        else:
            found.append(message)
        answered = message["role"] == "tool"
    if not tools:
        return found
    described = _DESCRIPTION.format(tools="".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in tools))
    first = found[0]
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{_text(first)}\n\n{described}"}, *found[1:]]
    if has_system:
        return [{"role": "system", "content": described}, *found]
    return [{**first, "content": f"{described}\n\n{_text(first)}"}, *found[1:]]


def _call(call: Mapping[str, Any]) -> str:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    head = f"{HERMES.before_name}{call['function']['name']}{HERMES.before_arguments}"
    return f"{HERMES.trigger}{head}{arguments}{HERMES.after_arguments}"


def _text(message: Mapping[str, Any]) -> str:
    """The content of a message as one text."""
    content: object = message["content"]
    if isinstance(content, list):
        return "".join(str(part["text"]) for part in cast(list[dict[str, Any]], content))
    return str(content)

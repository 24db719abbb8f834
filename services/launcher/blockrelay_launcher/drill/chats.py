"""The chats of a drill: the tools that they declare, and how a right answer is cut into its calls. Pure.

Gateways make the prompt and the grammar of a chat; both are read from its record (`DrilledSystem.record_of`). The
cutting here knows nothing of theirs: it looks for JSON in the whole text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple

#: What stands before the calls of an answer, by the form that its record names.
_TRIGGERS: Mapping[str, str] = {
    "hermes": "<tool_call>", "llama": "<|python_tag|>", "mistral": "[TOOL_CALLS]", "mistral_args": "[TOOL_CALLS]"
}  # fmt: skip
#: What a call has before its arguments, in any form.
_HEAD = re.compile(
    r'\{"name": "(?P<json>[\w-]+)", "(?:arguments|parameters)": |\[TOOL_CALLS\](?P<plain>[\w-]+)\[ARGS\]'
)
_TEXT = {"type": "string", "maxLength": 60}
_WORD = {"type": "string", "maxLength": 12}
#: The functions of which a chat declares one or two, with the properties of their arguments.
_FUNCTIONS: Mapping[str, Mapping[str, Any]] = {
    "tell": {"who": _TEXT, "words": {"type": "array", "items": _WORD, "minItems": 2, "maxItems": 12}},
    "find-toy": {"toy": {"enum": ["ball", "kite", "boat"]}, "count": {"type": "integer"}, "where": _TEXT},
    "ask_2": {"question": {"type": "string"}},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillChat:
    """The messages and tools of a chat, and what its record says about the text of its answer."""

    text: str
    """Content of its only message."""
    tools: tuple[str, ...]
    """Names of the functions that it declares."""
    choice: str
    """Its `tool_choice`: auto, required, or the name of a function."""
    form: str = ""
    """The form of calls in the answer, as its record names it; empty: it was not read yet."""
    shown: tuple[int, ...] = ()
    """Special tokens whose names are part of the text, from its record."""

    def body(self) -> dict[str, Any]:
        """Returns the fields of a POST to /v1/chat/completions that say what the chat is about."""
        named = {"type": "function", "function": {"name": self.choice}}
        return {
            "messages": [{"role": "user", "content": self.text}],
            "tools": [{"type": "function", "function": _function(name)} for name in self.tools],
            "tool_choice": named if self.choice in _FUNCTIONS else self.choice,
        }


class Call(NamedTuple):
    """A tool call in an answer."""

    name: str
    arguments: str
    """The text of a JSON object, or its beginning if the answer ended within it."""


class CutText(NamedTuple):
    """The parts of the text of an answer that may call tools."""

    content: str
    """The text before the calls."""
    calls: tuple[Call, ...]
    ends_with_call: bool = False
    """Whether there are calls, and the last one has all its arguments."""


def make_chat(rng: Random, words: Sequence[str]) -> DrillChat:
    """Returns a random chat about some of `words`, which declares one or two functions."""
    tools = tuple(rng.sample(sorted(_FUNCTIONS), rng.randint(1, 2)))
    choice = rng.choice(("auto", "required", "required", tools[0]))
    return DrillChat(text=" ".join(rng.choices(words, k=rng.randint(1, 40))), tools=tools, choice=choice)


def with_record(chat: DrillChat, *, form: str, shown: Sequence[int]) -> DrillChat:
    """Returns the chat with what its record says. Raises ValueError for a form that is unknown here."""
    if form not in _TRIGGERS:
        raise ValueError(f"its calls have the form {form!r}, which the drill does not know")
    return replace(chat, form=form, shown=tuple(shown))


def cut(text: str, form: str) -> CutText:
    """Cuts the whole text of an answer whose calls have this form."""
    trigger = _TRIGGERS[form]
    begin = 0 if form == "llama" and text.startswith("{") else text.find(trigger)
    if begin < 0:
        return CutText(text, ())
    calls, at = list[Call](), begin
    decoder = json.JSONDecoder(strict=False)
    while head := _HEAD.search(text, at):
        try:
            _, at = decoder.raw_decode(text, head.end())
        except ValueError:
            calls.append(Call(head["json"] or head["plain"], text[head.end() :]))
            return CutText(text[:begin].rstrip(), tuple(calls))
        calls.append(Call(head["json"] or head["plain"], text[head.end() : at]))
    return CutText(text[:begin].rstrip(), tuple(calls), bool(calls))


def _function(name: str) -> dict[str, Any]:
    properties = _FUNCTIONS[name]
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": name, "parameters": schema}

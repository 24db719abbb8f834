"""Finds the forms of message content that a chat template shows, and converts messages to them. Pure.

Content is a text or a list of parts. Templates are written for one, the other or both; most leave out silently what
they do not expect. So each template is rendered once with sample texts, which are looked for in its output.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, cast

from blockrelay.errors import BadRequest

Form = Literal["text", "parts"]
Render = Callable[[Sequence[Mapping[str, Any]]], str]
_FORMS: tuple[Form, ...] = ("text", "parts")
#: The roles of sample conversations, tried in this order: not every template takes system messages.
_CONVERSATIONS = (("system", "user", "assistant", "user"), ("user", "assistant", "user"), ("system", "user"), ("user",))


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForms:
    """The forms of message content that a template shows."""

    shown: Mapping[str, frozenset[Form]]
    """Forms by role; a role that is missing has those of `user`."""
    developer: str
    """The role that a developer's message has in the template."""

    @classmethod
    def of(cls, render: Render, names: frozenset[str]) -> "MessageForms":
        """Finds the forms of the template that `render` fills in; `names` are the strings in its expressions.

        `render` returns the prompt of some messages, and raises BadRequest if the template refuses them.
        """
        system_alone = "system" in names and "developer" not in names
        return cls(shown=_shown(render), developer="system" if system_alone else "developer")

    def shaped(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `message` with a role that the template knows and its content in a form that the template shows.

        If no form is known, content becomes text. Parts that become text are joined without anything between them.
        """
        role = self.developer if message["role"] == "developer" else message["role"]
        like = "system" if role == "developer" else role
        shown = self.shown.get(like) or self.shown.get("user", frozenset())
        return {**message, "role": role, **_content(message, shown)}


def continued(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """Returns `message` with `mark` appended to its text; if its content is a list of parts, to the last part."""
    content: object = message.get("content")
    if not isinstance(content, list):
        return {**message, "content": f"{content or ''}{mark}"}
    *before, last = cast(list[dict[str, Any]], content) or [_part("")]
    return {**message, "content": [*before, {**last, "text": last["text"] + mark}]}


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message; if its content is a list of parts, the text of the last part."""
    content: object = message.get("content")
    if isinstance(content, list):
        return cast(list[dict[str, Any]], content)[-1]["text"] if content else ""
    return str(content or "")


def _content(message: Mapping[str, Any], shown: frozenset[Form]) -> dict[str, Any]:
    """The `content` to replace, in a form that is shown; empty if the message has such a form already."""
    content: object = message.get("content")
    if isinstance(content, str) and "parts" in shown and "text" not in shown:
        return {"content": [_part(content)]}
    if isinstance(content, list) and "parts" not in shown:
        return {"content": "".join(str(part["text"]) for part in cast(list[dict[str, Any]], content))}
    return {}


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _shown(render: Render) -> dict[str, frozenset[Form]]:
    """The forms that the template shows, by role, found with the first sample conversation that it shows entirely."""
    for roles in _CONVERSATIONS:
        for forms in _combinations(roles):
            if _all_shown(render, roles, forms):
                return {role: _forms_of(render, roles, forms, role) for role in forms}
    return {}


def _combinations(roles: Sequence[str]) -> Iterator[dict[str, Form]]:
    """Yields every assignment of a form to each role."""
    different = tuple(dict.fromkeys(roles))
    for forms in product(_FORMS, repeat=len(different)):
        yield dict(zip(different, forms, strict=True))


def _forms_of(render: Render, roles: Sequence[str], forms: Mapping[str, Form], role: str) -> frozenset[Form]:
    """The forms that `role` may have while the other roles have `forms` and the template shows all texts."""
    return frozenset(form for form in _FORMS if _all_shown(render, roles, {**forms, role: form}))


def _all_shown(render: Render, roles: Sequence[str], forms: Mapping[str, Form]) -> bool:
    """True if the template shows every text of a sample conversation whose messages have `forms`."""
    texts: list[str] = []
    messages: list[dict[str, Any]] = []
    for index, role in enumerate(roles):
        # Two parts: some templates show only the first.
        content = [f"{role}Says{index}", *([f"{role}Adds{index}"] if forms[role] == "parts" else [])]
        messages.append(
            {"role": role, "content": content[0] if len(content) == 1 else [_part(text) for text in content]}
        )
        texts += content
    try:
        prompt = render(messages)
    except BadRequest:
        return False
    # A template that prints the list of parts as Python or JSON contains the texts too, but does not show them.
    return all(text in prompt and not re.search(rf"text\\?['\"]\W*{text}", prompt) for text in texts)

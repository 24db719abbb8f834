"""Which forms of messages a chat template shows, found by rendering it, and messages in such a form. Pure.

Content comes as text or as a list of parts, and templates are written for one, the other or both; what a template does
not expect, most leave out without a word. So a template is asked once, with texts that are easily found again.
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
#: Conversations that a template is asked with, in this order: not every one takes system messages.
_CONVERSATIONS = (("system", "user", "assistant", "user"), ("user", "assistant", "user"), ("system", "user"), ("user",))


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForms:
    """What a template shows of messages, by role; a role that is not there is as `user`."""

    shown: Mapping[str, frozenset[Form]]
    developer: str
    """The role that a developer's message has in the template."""

    @classmethod
    def of(cls, render: Render, names: frozenset[str]) -> "MessageForms":
        """The forms of the template that `render` fills in, whose expressions spell out the strings `names`."""
        system_alone = "system" in names and "developer" not in names
        return cls(shown=_shown(render), developer="system" if system_alone else "developer")

    def shaped(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """`message` with a role that the template knows, and its content in a form that it shows."""
        role = self.developer if message["role"] == "developer" else message["role"]
        like = "system" if role == "developer" else role
        shown = self.shown.get(like) or self.shown.get("user", frozenset())
        return {**message, "role": role, **_content(message, shown)}


def continued(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """`message` with `mark` behind its text."""
    content: object = message.get("content")
    if not isinstance(content, list):
        return {**message, "content": f"{content or ''}{mark}"}
    *before, last = cast(list[dict[str, Any]], content) or [_part("")]
    return {**message, "content": [*before, {**last, "text": last["text"] + mark}]}


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message, in whichever form: that of its last part, where it has parts."""
    content: object = message.get("content")
    if isinstance(content, list):
        return cast(list[dict[str, Any]], content)[-1]["text"] if content else ""
    return str(content or "")


def _content(message: Mapping[str, Any], shown: frozenset[Form]) -> dict[str, Any]:
    content: object = message.get("content")
    if isinstance(content, str) and "parts" in shown and "text" not in shown:
        return {"content": [_part(content)]}
    if isinstance(content, list) and "parts" not in shown:
        return {"content": "".join(str(part["text"]) for part in cast(list[dict[str, Any]], content))}
    return {}


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _shown(render: Render) -> dict[str, frozenset[Form]]:
    for roles in _CONVERSATIONS:
        for forms in _combinations(roles):
            if _all_shown(render, roles, forms):
                return {role: _forms_of(render, roles, forms, role) for role in forms}
    return {}


def _combinations(roles: Sequence[str]) -> Iterator[dict[str, Form]]:
    """Every choice of a form for each role."""
    different = tuple(dict.fromkeys(roles))
    for forms in product(_FORMS, repeat=len(different)):
        yield dict(zip(different, forms, strict=True))


def _forms_of(render: Render, roles: Sequence[str], forms: Mapping[str, Form], role: str) -> frozenset[Form]:
    """The forms of `role`, where all is shown with `forms`."""
    return frozenset(form for form in _FORMS if _all_shown(render, roles, {**forms, role: form}))


def _all_shown(render: Render, roles: Sequence[str], forms: Mapping[str, Form]) -> bool:
    texts: list[str] = []
    messages: list[dict[str, Any]] = []
    for index, role in enumerate(roles):
        # Two parts: some templates show only the first.
        said = [f"{role}Says{index}", *([f"{role}Adds{index}"] if forms[role] == "parts" else [])]
        messages.append({"role": role, "content": said[0] if len(said) == 1 else [_part(text) for text in said]})
        texts += said
    try:
        found = render(messages)
    except BadRequest:
        return False
    # A list that is printed as Python or JSON shows its texts too, and is not meant.
    return all(text in found and not re.search(rf"text\\?['\"]\W*{text}", found) for text in texts)

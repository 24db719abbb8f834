"""Refuses or ignores the fields that have no effect here. Pure.

A field that would change the text is refused by name. A field that would not is ignored, and the answer names it in a
header, unless it asks for what is done anyway. `Blockrelay-Strict: true` refuses both.
"""

import json
from collections.abc import Iterator, Sequence
from typing import cast

from blockrelay.errors import BadRequest
from blockrelay.observability.metrics.gateway import IGNORED_FIELDS
from blockrelay_gateway.api.openai.schemas import (
    IGNORED,
    OF_CHATS,
    REFUSED,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
)

HEADER = "x-blockrelay-ignored"
#: The most names in the header.
MAX_NAMES = 20
#: Fields of a message that carry content other than text. Its other unknown fields are ignored.
REFUSED_OF_MESSAGES = ("audio", "function_call")
assert {*IGNORED, "messages", "stream_options"} == set(IGNORED_FIELDS)


def ignored_fields(request: CompletionRequest | ChatRequest, *, strict: bool = False) -> tuple[str, ...]:
    """Names of the ignored fields, sorted: `<field>`, `messages.<name>` or, of parts, `messages.content.<name>`.

    Raises BadRequest, naming the field, for one that would change the text; if `strict`, also for an ignored one.
    """
    for name, accepted in REFUSED.items():
        if name in OF_CHATS and isinstance(request, ChatRequest):
            continue
        value = getattr(request, name)
        if value is not None and not _is_one_of(value, accepted):
            allowed = " or ".join(json.dumps(neutral) for neutral in accepted) or "null"
            raise BadRequest(f"{name} is not supported: leave it out or send {allowed}", param=name)
    ignored = {
        name
        for name, accepted in IGNORED.items()
        if (value := getattr(request, name)) is not None and not _is_one_of(value, accepted)
    }
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        ignored.add("stream_options.include_obfuscation")
    if isinstance(request, ChatRequest):
        for index, message in enumerate(request.messages):
            ignored.update(_of_message(message, f"messages.{index}"))
    if strict and ignored:
        name = min(ignored)
        raise BadRequest(
            f"{name} changes nothing here, and Blockrelay-Strict: true refuses what is ignored", param=name
        )
    return tuple(sorted(ignored))


def header(ignored: Sequence[str]) -> dict[str, str]:
    """The response header that names up to MAX_NAMES ignored fields; no header if none is ignored."""
    return {HEADER: ",".join(ignored[:MAX_NAMES])} if ignored else {}


def label(name: str) -> str:
    """The metric's label for a field: its top-level field."""
    return name.partition(".")[0]


def _of_message(message: ChatMessage, param: str) -> Iterator[str]:
    """Yields the ignored fields of a message and its parts. Raises BadRequest for one in REFUSED_OF_MESSAGES."""
    for name, value in (message.model_extra or {}).items():
        if value is None or value == []:
            continue
        if name in REFUSED_OF_MESSAGES:
            raise BadRequest(f"{param}.{name} is not supported", param=f"{param}.{name}")
        yield f"messages.{_plain(name)}"
    parts = cast(list[object], message.content) if isinstance(message.content, list) else []
    for part in parts:
        fields = cast(dict[str, object], part) if isinstance(part, dict) else {}
        yield from (f"messages.content.{_plain(name)}" for name in fields if name not in ("type", "text"))


def _plain(name: str) -> str:
    """A client's field name made fit for a header: at most 40 letters, digits, - and _; others become ?."""
    plain = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_-") else "?" for letter in name)
    return plain[:40]


def _is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    """True if `value` equals one of `neutral` as JSON: true is not 1."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)

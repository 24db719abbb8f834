"""Tool calls of answers in OpenAI's shape. Pure."""

import hashlib
import string
from collections.abc import Sequence
from typing import Any

from blockrelay_gateway.api.openai.tools.cutter import CallCutter, Piece
from blockrelay_gateway.api.openai.tools.formats import FORMS

#: Characters of a call's id, and how many it has: Mistral's templates refuse others.
_LETTERS = string.digits + string.ascii_letters
ID_LENGTH = 9


def call_id(request_id: str, index: int) -> str:
    """Returns the id of a request's call `index`: the same at every gateway, and whenever it is made."""
    number = int.from_bytes(hashlib.sha256(f"{request_id} {index}".encode()).digest())
    return "".join(_LETTERS[number // 62**place % 62] for place in range(ID_LENGTH))


def cutter_of(calls: str) -> CallCutter | None:
    """Returns a cutter for the form that a request's body names as `calls`; None: the text has no calls."""
    form = FORMS.get(calls)
    return CallCutter(form) if form is not None else None


def delta_of(pieces: Sequence[Piece], request_id: str) -> dict[str, Any]:
    """Returns the `delta` of a stream's event for the `pieces` of one token, or of the end.

    Id, type and name of a call are in its first delta only. The delta is empty where a token adds nothing.
    """
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if piece.call is None:
            delta["content"] = delta.get("content", "") + piece.text
            continue
        if piece.name:
            named = {"id": call_id(request_id, piece.call), "type": "function", "function": {"name": piece.name}}
            calls[piece.call] = {"index": piece.call, **named}
        function = calls.setdefault(piece.call, {"index": piece.call, "function": {}})["function"]
        function["arguments"] = function.get("arguments", "") + piece.text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def calls_of(pieces: Sequence[Piece], request_id: str) -> list[dict[str, Any]]:
    """Returns the `tool_calls` of a message."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.name:
            function = {"name": piece.name, "arguments": ""}
            calls.append({"id": call_id(request_id, len(calls)), "type": "function", "function": function})
        if piece.call is not None:
            calls[-1]["function"]["arguments"] += piece.text
    return calls


def message_of(text: str, calls: str, request_id: str) -> tuple[dict[str, Any], bool]:
    """Returns content and calls of a message with the whole `text`, and whether it ends with a whole call."""
    cutter = cutter_of(calls)
    if cutter is None:
        return {"content": text}, False
    pieces = [*cutter.push(text), *cutter.finish()]
    content = "".join(piece.text for piece in pieces if piece.call is None)
    found = calls_of(pieces, request_id)
    if not found:
        return {"content": content}, False
    return {"content": content or None, "tool_calls": found}, cutter.is_whole

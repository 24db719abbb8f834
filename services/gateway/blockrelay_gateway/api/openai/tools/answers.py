"""Tool calls of answers in OpenAI's shape. Pure."""

import hashlib
import string
from collections.abc import Sequence
from typing import Any

from blockrelay_gateway.api.openai.tools.cutter import Piece

#: Characters of a call's id, and how many it has: Mistral's templates refuse others.
_LETTERS = string.digits + string.ascii_letters
ID_LENGTH = 9


def call_id(request_id: str, index: int) -> str:
    """Returns the id of a request's call `index`: the same at every gateway, and whenever it is made."""
    number = int.from_bytes(hashlib.sha256(f"{request_id} {index}".encode()).digest())
    return "".join(_LETTERS[number // 62**place % 62] for place in range(ID_LENGTH))


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

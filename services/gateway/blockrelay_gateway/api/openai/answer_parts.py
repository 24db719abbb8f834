"""The parts of a chat's answer in OpenAI's shape: its reasoning, its content and its tool calls. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.api.openai.reasoning import CLOSE, OPEN, ReasoningCutter
from blockrelay_gateway.api.openai.tools.answers import call_id, calls_of
from blockrelay_gateway.api.openai.tools.cutter import CallCutter, Piece
from blockrelay_gateway.api.openai.tools.formats import CallForm, form_named


class AnswerCutter:
    """Cuts the text of one answer, piece by piece. Its pieces are a function of the text so far."""

    def __init__(self, form: CallForm | None, reasoning: str) -> None:
        """`form` is that of calls in the answer; `reasoning` is the request's."""
        self._calls = CallCutter(form) if form is not None else None
        self._leads = form is not None and form.leading
        # Nothing but calls follows a trigger, also within reasoning.
        trigger = form.trigger if form is not None and not form.leading else ""
        self._reasoning = ReasoningCutter(reasoning, trigger) if reasoning else None

    @property
    def ends_with_calls(self) -> bool:
        """Whether there are calls, and the last one has all its arguments."""
        return self._calls is not None and self._calls.is_whole

    def push(self, text: str) -> list[Piece]:
        """Returns what is certain with the next `text`."""
        reasoning, answer = self._reasoning.push(text) if self._reasoning else ("", text)
        if self._leads and self._reasoning and self._reasoning.has_begun:  # calls would stand at the very beginning
            self._calls = None
        return [*_reasoned(reasoning), *self._answered(answer)]

    def finish(self) -> list[Piece]:
        """Returns the rest, at the end of the answer. Called once."""
        reasoning, answer = self._reasoning.finish() if self._reasoning else ("", "")
        pieces = [*_reasoned(reasoning), *self._answered(answer)]
        return [*pieces, *(self._calls.finish() if self._calls else [])]

    def _answered(self, text: str) -> list[Piece]:
        if self._calls is not None:
            return self._calls.push(text)
        return [Piece(text)] if text else []


def _reasoned(text: str) -> list[Piece]:
    return [Piece(text, is_reasoning=True)] if text else []


def cutter_of(calls: str, reasoning: str) -> AnswerCutter | None:
    """Returns a cutter for what a request's body has as `calls` and `reasoning`; None: all its text is content."""
    form = form_named(calls)
    return AnswerCutter(form, reasoning) if form is not None or reasoning else None


def with_parts(
    asked: AdmissionRequest, form: CallForm | None, reasoning: str, tokenizer: Tokenizer
) -> AdmissionRequest:
    """Returns a request whose record says of which parts its answer may consist, so that any gateway can cut it."""
    marks = (*((OPEN, CLOSE) if reasoning else ()), *(form.marks if form is not None else ()))
    shown = tuple(token for mark in marks for token in tokenizer.bytes.specials(mark))
    calls = "" if form is None else form.name
    return replace(asked, body=replace(asked.body, calls=calls, reasoning=reasoning, shown=shown))


def delta_of(pieces: Sequence[Piece], request_id: str) -> dict[str, Any]:
    """Returns the `delta` of a stream's event for the `pieces` of one token, or of the end.

    Id, type and name of a call are in its first delta only. The delta is empty where a token adds nothing.
    """
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if piece.call is None:
            name = "reasoning_content" if piece.is_reasoning else "content"
            delta[name] = delta.get(name, "") + piece.text
            continue
        if piece.name:
            named = {"id": call_id(request_id, piece.call), "type": "function", "function": {"name": piece.name}}
            calls[piece.call] = {"index": piece.call, **named}
        function = calls.setdefault(piece.call, {"index": piece.call, "function": {}})["function"]
        function["arguments"] = function.get("arguments", "") + piece.text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def message_of(text: str, calls: str, reasoning: str, request_id: str) -> tuple[dict[str, Any], bool]:
    """Returns the parts of a message with the whole `text`, and whether it ends with a whole call.

    The content is null where there is none beside calls or reasoning.
    """
    cutter = cutter_of(calls, reasoning)
    if cutter is None:
        return {"content": text}, False
    pieces = [*cutter.push(text), *cutter.finish()]
    content = "".join(piece.text for piece in pieces if piece.call is None and not piece.is_reasoning)
    reasoned = "".join(piece.text for piece in pieces if piece.is_reasoning)
    found = calls_of(pieces, request_id)
    message: dict[str, Any] = {"content": content or (None if found or reasoned else "")}
    if reasoned:
        message["reasoning_content"] = reasoned
    if found:
        message["tool_calls"] = found
    return message, cutter.ends_with_calls

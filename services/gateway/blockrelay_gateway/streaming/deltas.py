"""Turns the entries of a token log into deltas: the text that each position adds to an answer. Pure.

Every format (completions, chat, infer) renders the same deltas, whether it streams or not, so that any gateway can
continue a stream from the log alone.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from blockrelay.errors import (
    BlockrelayError,
    Cancelled,
    Conflict,
    DeadlineExceeded,
    ExecutionError,
    FallbackDenied,
    FallbackTooSlow,
    NumericsChanged,
)
from blockrelay.protocol.messages import EndEntry, LogEntry, TokenEntry, TokenLogprobs
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.text.tokenizer import Tokenizer, TokenList, VisibleText


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The part of an answer that one log entry adds. Either `token` or `end` is set."""

    position: int
    """Position in the log, from 1; that of the end is one behind the last token's."""
    text: str
    offset: int
    """Number of characters of the answer before `text`."""
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    end: EndEntry | None = None


class Relay:
    """Turns the entries of one log, from position 1 on, into deltas."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        eos_ids: Sequence[int],
        prompt: TokenList,
        shown: Collection[int] = (),
    ) -> None:
        """Prepares the text of a request's tokens behind `prompt`. Without a tokenizer all text is empty.

        `shown` has the special tokens whose names are part of the text.
        """
        self._visible = None if tokenizer is None else VisibleText(tokenizer, params, eos_ids, prompt, shown)
        self._offset = 0

    def push(self, entry: LogEntry) -> Delta:
        """Returns the delta of the next entry of the log. Raises WireError for unreadable log probabilities."""
        offset = self._offset
        if isinstance(entry, TokenEntry):
            text = self._visible.push(entry.token) if self._visible else ""
            self._offset += len(text)
            logprobs = TokenLogprobs.decode(entry.logprobs) if entry.logprobs else None
            return Delta(position=entry.position, text=text, offset=offset, token=entry.token, logprobs=logprobs)
        text = self._visible.finish() if self._visible else ""
        self._offset += len(text)
        return Delta(position=entry.position, text=text, offset=offset, end=entry)


@dataclass(slots=True)
class CollectedAnswer:
    """The deltas of one request so far, collected with `add`."""

    texts: list[str] = field(default_factory=list[str])
    tokens: list[Delta] = field(default_factory=list[Delta])
    end: EndEntry | None = None

    def add(self, delta: Delta) -> None:
        """Appends the next delta."""
        self.texts.append(delta.text)
        if delta.end is None:
            self.tokens.append(delta)
        else:
            self.end = delta.end

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)

    @property
    def token_ids(self) -> list[int]:
        """The ids of the tokens so far."""
        return [delta.token for delta in self.tokens if delta.token is not None]


_STATUS = {
    "stop": "completed",
    "length": "completed",
    "tensor": "completed",
    "cancelled": "cancelled",
    "expired": "expired",
    "error": "failed",
}


def status_of_record(state: str, end: str) -> str:
    """The status of a request in the API, from its record's `state` and the reason of its `end` ("": it runs)."""
    return _STATUS[end] if end else state


def finish_reason(end: EndEntry, *, calls: bool = False) -> str | None:
    """OpenAI's finish_reason: "stop" (with `calls` "tool_calls") or "length"; None for another end."""
    if calls and end.reason == "stop":
        return "tool_calls"
    return end.reason if end.reason in ("stop", "length") else None


def failure(end: EndEntry) -> BlockrelayError | None:
    """The error of a request that failed, expired or was cancelled; None for one that ended well.

    It is a Conflict for a session step that Redis lost with the steps before it.
    """
    message = str(end.meta.get("error") or "")
    match end.reason:
        case "error" if end.meta.get("code") == "numerics_changed":
            return NumericsChanged(message)
        case "error" if end.meta.get("code") == "fallback_denied":
            return FallbackDenied(message)
        case "error" if end.meta.get("code") == "fallback_too_slow":
            return FallbackTooSlow(message, block=end.meta.get("failed_block"))
        case "error" if end.meta.get("code") == "step":
            return Conflict(message, param="step")
        case "error":
            return ExecutionError(message or "the request failed", block=end.meta.get("failed_block"))
        case "expired":
            return DeadlineExceeded(message or "the request's timeout passed before it was finished")
        case "cancelled":
            return Cancelled(f"the request was cancelled{': ' + message if message else ''}")
        case _:
            return None

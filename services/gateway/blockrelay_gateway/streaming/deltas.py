"""Log entries to text by position: what every answer, streamed or not, is made of. Pure.

Every format (completions, chat, infer) is a rendering of the same deltas, so that a stream can be continued anywhere
from the log alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from blockrelay.errors import (
    BlockrelayError,
    Cancelled,
    Conflict,
    DeadlineExceeded,
    ExecutionError,
    FallbackDenied,
    NumericsChanged,
)
from blockrelay.protocol.messages import EndEntry, LogEntry, TokenEntry, TokenLogprobs
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.text.tokenizer import Tokenizer, TokenList, VisibleText


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one log entry adds. `offset`: characters shown before it. Either `token` or `end` is set."""

    position: int
    text: str
    offset: int
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    end: EndEntry | None = None


class Relay:
    """Turns the entries of one log, from position 1 on, into deltas."""

    def __init__(
        self, tokenizer: Tokenizer | None, params: SamplingParams, eos_ids: Sequence[int], prompt: TokenList
    ) -> None:
        """Without a tokenizer all text is empty."""
        self._visible = None if tokenizer is None else VisibleText.of(tokenizer, params, eos_ids, prompt)
        self._offset = 0

    def push(self, entry: LogEntry) -> Delta:
        """The delta of the next entry."""
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
class Answer:
    """Everything of one request so far. `add` is the only writer."""

    texts: list[str] = field(default_factory=list[str])
    tokens: list[Delta] = field(default_factory=list[Delta])
    end: EndEntry | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        if delta.end is None:
            self.tokens.append(delta)
        else:
            self.end = delta.end

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def token_ids(self) -> list[int]:
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
    """What clients are told of a record's state, and of its end if it has ended."""
    return _STATUS[end] if end else state


def finish_reason(end: EndEntry) -> str | None:
    """OpenAI's word for a good end, None for a bad one."""
    return end.reason if end.reason in ("stop", "length") else None


def failure(end: EndEntry) -> BlockrelayError | None:
    """The error that a bad end stands for."""
    said = str(end.meta.get("error") or "")
    match end.reason:
        case "error" if end.meta.get("code") == "numerics_changed":
            return NumericsChanged(said)
        case "error" if end.meta.get("code") == "fallback_denied":
            return FallbackDenied(said)
        case "error" if end.meta.get("code") == "step":
            return Conflict(said, param="step")
        case "error":
            return ExecutionError(said or "the request failed", block=end.meta.get("failed_block"))
        case "expired":
            return DeadlineExceeded(said or "the request's timeout passed before it was finished")
        case "cancelled":
            return Cancelled(f"the request was cancelled{': ' + said if said else ''}")
        case _:
            return None

"""Builds answers and stream events in OpenAI's shapes. Pure.

Extensions that clients may ignore: `seed`, `max_tokens` (the limit in force), `token_ids` and `prompt_token_ids` in a
choice; `fallback_events` beside `usage`. A stream has the first two in the last event of a choice, a chat also in the
first. The role of a chat's message is in an event of its own for choice 0, and with the first token of other choices:
each position of an event id has one event, so that a stream which goes on elsewhere has each role once too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from blockrelay.errors import BlockrelayError
from blockrelay.protocol.messages import TokenLogprobs
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.api.openai.answer_parts import AnswerCutter, cutter_of, delta_of, message_of
from blockrelay_gateway.api.openai.prompt_answers import by_token, echoed, legacy_lists, scores_of
from blockrelay_gateway.http.errors import error_body
from blockrelay_gateway.streaming.active_requests.active_request import ActiveRequest
from blockrelay_gateway.streaming.deltas import CollectedAnswer, Delta, finish_reason
from blockrelay_gateway.streaming.responses import ResponseFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOptions:
    """The optional parts of an answer that the client asked for."""

    include_usage: bool = False
    """A stream ends with an event with the token counts."""
    continuous_usage: bool = False
    """Every event of a stream has the token counts so far."""
    return_token_ids: bool = False
    echo: bool = False
    """A completion begins with its prompt."""
    prompt_logprobs: int | None = None
    """Number of alternatives that are listed for each token of the prompt; None: no token is listed."""


def usage(requests: Sequence[ActiveRequest]) -> dict[str, Any]:
    """OpenAI's `usage`: token counts, summed over `requests`. Every committed token counts, also an end token.

    A prompt counts once, however many choices it has. `cached_tokens` counts the tokens of prompts that were prefix
    hits in the last run, of its first choice.
    """
    first = [active for active in requests if not active.body.sample] or requests[:1]
    prompt = sum(active.body.prompt.size for active in first)
    new = sum(active.tokens for active in requests)
    cached = sum(int(active.end.meta.get("cached_tokens", 0)) for active in first if active.end is not None)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def usage_at(active: ActiveRequest, delta: Delta | None) -> dict[str, Any]:
    """Token counts of one choice up to `delta` (None: before its first token); `cached_tokens` at the end only."""
    prompt = active.body.prompt.size
    if delta is not None and delta.end is not None:
        return usage([active])
    new = 0 if delta is None else delta.position
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def in_force(active: ActiveRequest) -> dict[str, Any]:
    """The seed and the limit of new tokens with which a request runs; its client may have left them open."""
    return {"seed": active.params.seed, "max_tokens": active.params.max_tokens}


def accepted_headers(requests: Sequence[ActiveRequest]) -> dict[str, str]:
    """The headers `x-blockrelay-seed` and `x-blockrelay-max-tokens` of a stream, with the values `in_force`.

    Values of several requests are joined by commas; there is at least one request. Clients can read them before the
    first event, which comes with the first token.
    """
    values = [in_force(active) for active in requests]
    return {f"x-blockrelay-{name.replace('_', '-')}": ",".join(str(one[name]) for one in values) for name in values[0]}


def fallback_events(requests: Sequence[ActiveRequest]) -> list[dict[str, Any]]:
    """The fallbacks of all `requests`, as JSON objects: blocks that another device computed after a failure."""
    return [event.to_json() for active in requests if active.end is not None for event in active.end.fallbacks]


class OpenAIFormat(ResponseFormat):
    """The parts that answers to completions and chats have in common.

    `index` is the index of the choice in the answer. `fingerprint` is the numerics ids of the workers, for
    `system_fingerprint`; a request's `fingerprint`, the hash of its body, is another thing.
    """

    opens_early = False  # like OpenAI's servers: benchmarks take the first event for the first token
    object_name: ClassVar[str]
    """The `object` of a whole answer."""
    chunk_name: ClassVar[str]
    """The `object` of an event."""

    def __init__(self, model: str, tokenizer: Tokenizer | None, options: ResponseOptions) -> None:
        """`model` is the model's name in the API.

        `tokenizer` is needed only for the text of log probabilities; None: the model has none.
        """
        self._model, self._tokenizer, self._options = model, tokenizer, options

    def _head(self, active: ActiveRequest, fingerprint: str, name: str) -> dict[str, Any]:
        return {
            "id": active.public_id(self.prefix),
            "object": name,
            "created": active.created,
            "model": self._model,
            "system_fingerprint": fingerprint or None,
        }

    def _ids(self, active: ActiveRequest, tokens: list[int], *, first: bool) -> dict[str, Any]:
        if not self._options.return_token_ids:
            return {}
        prompt = {"prompt_token_ids": active.body.prompt.tolist()} if first else {}
        return {"token_ids": tokens, **prompt}

    def _chunk(
        self, active: ActiveRequest, fingerprint: str, choice: dict[str, Any], delta: Delta | None
    ) -> dict[str, Any]:
        body = self._head(active, fingerprint, self.chunk_name) | {"choices": [choice]}
        if delta is not None and delta.end is not None:
            choice |= in_force(active)
            body["fallback_events"] = fallback_events([active])
        if self._options.continuous_usage:
            body["usage"] = usage_at(active, delta)
        elif self._options.include_usage:
            body["usage"] = None
        return body

    def _content(self, answer: CollectedAnswer, active: ActiveRequest) -> dict[str, Any]:
        """The fields of a choice with text and log probabilities of the answer, and its end where calls change it."""
        raise NotImplementedError

    def _of_prompt(self, active: ActiveRequest) -> dict[str, Any]:
        """The field `prompt_logprobs`, if the client asked for it."""
        if (listed := self._options.prompt_logprobs) is None:
            return {}
        return {"prompt_logprobs": by_token(active.body.prompt.tolist(), scores_of(active), listed, self._tokenizer)}

    def whole(self, answers: Sequence[CollectedAnswer], requests: Sequence[ActiveRequest]) -> dict[str, Any]:
        """The answer without streaming, with one choice for each of `requests`; every request has ended well."""
        choices = [
            {
                "index": index,
                "finish_reason": finish_reason(answer.end) if answer.end else None,
                **self._content(answer, active),
                **in_force(active),
                **self._ids(active, answer.token_ids, first=True),
            }
            for index, (answer, active) in enumerate(zip(answers, requests, strict=True))
        ]
        return self._sums(choices, requests, self.object_name)

    def _sums(self, choices: list[dict[str, Any]], requests: Sequence[ActiveRequest], name: str) -> dict[str, Any]:
        """An answer or event named `name` with the token counts and fallbacks of all `requests`."""
        return self._head(requests[0], requests[0].numerics, name) | {
            "choices": choices,
            "usage": usage(requests),
            "fallback_events": fallback_events(requests),
        }

    def problem(self, error: BlockrelayError, active: ActiveRequest) -> dict[str, Any]:
        """The last event of a request that failed: the error in OpenAI's shape."""
        return error_body(error)

    def closing(self, requests: Sequence[ActiveRequest]) -> dict[str, Any] | None:
        """The event behind the last choice, with the token counts; None unless the client asked for them."""
        return self._sums([], requests, self.chunk_name) if self._options.include_usage else None

    def background(self, active: ActiveRequest, status: str) -> dict[str, Any]:
        """The answer to a body that runs in the background; `status` is the one of GET /v1/requests/{id}.

        `active` is the request of its first choice, `status` and the values in force are of that one.
        """
        return self._head(active, "", self.object_name) | {"status": status, "background": True, **in_force(active)}

    def _shown(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token) if self._tokenizer else b""

    def _name(self, token: int) -> str:
        """A token as completions list it: its text, or `bytes:\\x..` if its bytes alone are not UTF-8."""
        if self._tokenizer is None:
            return f"token_id:{token}"
        raw = self._shown(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class CompletionFormat(OpenAIFormat):
    """The answers of POST /v1/completions."""

    prefix = "cmpl"
    object_name = chunk_name = "text_completion"

    def chunk(self, index: int, delta: Delta, active: ActiveRequest, fingerprint: str) -> dict[str, Any]:
        """The event of one token, or of the end, of the choice `index`."""
        tokens = [] if delta.token is None else [delta.token]
        choice = {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs([delta] if delta.logprobs else []),
            "finish_reason": finish_reason(delta.end) if delta.end else None,
            **self._ids(active, tokens, first=delta.position == 1),
        }
        return self._chunk(active, fingerprint, choice, delta)

    def _content(self, answer: CollectedAnswer, active: ActiveRequest) -> dict[str, Any]:
        tokens = answer.tokens if active.params.logprobs is not None else []
        content = {"text": answer.text, "logprobs": self._logprobs(tokens)}
        if self._options.echo:
            content |= self._echo(content, active)
        return content | self._of_prompt(active)

    def _echo(self, content: dict[str, Any], active: ActiveRequest) -> dict[str, Any]:
        """The `content` of a choice behind the prompt: its text, and the log probabilities that it asks for."""
        prompt: list[int] = active.body.prompt.tolist()
        echo = echoed(self._tokenizer, prompt)
        shown: dict[str, Any] = {"text": echo.text + content["text"]}
        if (listed := active.params.logprobs) is not None:
            both = legacy_lists(prompt, echo, scores_of(active), listed, self._name)
            behind: dict[str, list[Any]] = content["logprobs"] or {}
            for name, values in behind.items():
                both[name] += [len(echo.text) + value for value in values] if name == "text_offset" else values
            shown["logprobs"] = both
        return shown

    def _logprobs(self, deltas: Sequence[Delta]) -> dict[str, Any] | None:
        known = [(delta, delta.logprobs, delta.token) for delta in deltas]
        if not known:
            return None
        return {
            "tokens": [self._name(token) for _, _, token in known if token is not None],
            "token_logprobs": [logprobs.logprob if logprobs else None for _, logprobs, _ in known],
            "top_logprobs": [self._best(token, logprobs) for _, logprobs, token in known],
            "text_offset": [delta.offset for delta, _, _ in known],
        }

    def _best(self, token: int | None, logprobs: TokenLogprobs | None) -> dict[str, float] | None:
        """Log probabilities of the likeliest tokens and of the chosen one, by token."""
        if logprobs is None or token is None:
            return None
        return {self._name(other): value for other, value in logprobs.top} | {self._name(token): logprobs.logprob}


class ChatFormat(OpenAIFormat):
    """The answers of POST /v1/chat/completions."""

    prefix = "chatcmpl"
    object_name, chunk_name = "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, tokenizer: Tokenizer | None, options: ResponseOptions) -> None:
        """Prepares one answer; the arguments are those of OpenAIFormat."""
        super().__init__(model, tokenizer, options)
        self._cutters: dict[int, AnswerCutter | None] = {}

    def whole(self, answers: Sequence[CollectedAnswer], requests: Sequence[ActiveRequest]) -> dict[str, Any]:
        """The answer without streaming (see `OpenAIFormat.whole`), with the prompt's log probabilities if asked for."""
        return super().whole(answers, requests) | self._of_prompt(requests[0])

    def opening(self, active: ActiveRequest) -> dict[str, Any] | None:
        """The first event: the role of the message, without content."""
        choice: dict[str, Any] = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
            **in_force(active),
        }
        return self._chunk(active, "", choice, None)

    def chunk(self, index: int, delta: Delta, active: ActiveRequest, fingerprint: str) -> dict[str, Any]:
        """The event of one token, or of the end."""
        tokens = [] if delta.token is None else [delta.token]
        opens = index > 0 and delta.position == 1
        choice = {
            "index": index,
            "delta": ({"role": "assistant"} if opens else {})
            | ({"content": delta.text} if delta.text or delta.end is None else {}),
            "logprobs": self._logprobs([delta]) if delta.logprobs else None,
            "finish_reason": finish_reason(delta.end) if delta.end else None,
            **(in_force(active) if opens else {}),
            **self._ids(active, tokens, first=delta.position == 1),
        }
        if active.body.calls or active.body.reasoning:
            self._cut(choice, index, delta, active)
        return self._chunk(active, fingerprint, choice, delta)

    def _cut(self, choice: dict[str, Any], index: int, delta: Delta, active: ActiveRequest) -> None:
        """Changes the `choice` of an event of an answer that may call tools, or reasons before it answers."""
        cutter = self._cutters.setdefault(index, cutter_of(active.body.calls, active.body.reasoning))
        if cutter is None:
            return
        pieces = [*cutter.push(delta.text), *(cutter.finish() if delta.end else [])]
        choice["delta"].pop("content", None)
        choice["delta"] |= delta_of(pieces, active.id)
        if delta.end and cutter.ends_with_calls:
            choice["finish_reason"] = finish_reason(delta.end, calls=True)

    def _content(self, answer: CollectedAnswer, active: ActiveRequest) -> dict[str, Any]:
        message, calls = message_of(answer.text, active.body.calls, active.body.reasoning, active.id)
        return {
            "message": {"role": "assistant", **message, "refusal": None},
            "logprobs": self._logprobs(answer.tokens) if active.params.logprobs is not None else None,
            **({"finish_reason": finish_reason(answer.end, calls=True)} if calls and answer.end else {}),
        }

    def _logprobs(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        return {
            "content": [
                self._one(delta.token, delta.logprobs) for delta in deltas if delta.logprobs and delta.token is not None
            ],
            "refusal": None,
        }

    def _one(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        best = [self._pair(other, value) for other, value in logprobs.top]
        return self._pair(token, logprobs.logprob) | {"top_logprobs": best}

    def _pair(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._shown(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

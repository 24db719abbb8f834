"""One answer of the demo's system: asked for, streamed, measured, cancelled."""

import contextlib
import json
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import httpx

from blockrelay.block_folder.manifest import Manifest
from blockrelay.errors import ServiceUnavailable
from blockrelay_launcher.client.resuming import Refused, resuming_stream

MAX_TOKENS, SEED, TEMPERATURE = 320, 13, 0.7
#: Seconds without a sign of an answer after which it is given up.
PATIENCE_S = 60.0


@dataclass(slots=True)
class Answer:
    """What came of one request. Times are of the monotonic clock, in seconds.

    `request` is its id once a gateway has accepted it. `tokens` counts those that came, `prompt_tokens` is known at the
    end. `max_tokens`: what the context has room for, as a chat's first event says it.
    """

    asked: float
    request: str = ""
    first: float | None = None
    last: float | None = None
    text: str = ""
    prompt_tokens: int = 0
    max_tokens: int = 0
    tokens: int = 0
    reason: str = ""
    fingerprint: str = ""
    fallbacks: int = 0

    def accepted(self, request: str) -> None:
        """A gateway has named it."""
        self.request = request

    def take(self, chunk: Mapping[str, Any]) -> str:
        """The text in a chunk of either format; notes everything else."""
        self.fingerprint = chunk.get("system_fingerprint") or self.fingerprint
        self.fallbacks = len(chunk.get("fallback_events") or []) or self.fallbacks
        if usage := chunk.get("usage"):
            self.prompt_tokens, self.tokens = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in chunk["choices"]:
            self.reason = choice.get("finish_reason") or self.reason
            self.tokens += len(choice.get("token_ids") or ())
            self.max_tokens = choice.get("max_tokens") or self.max_tokens
            piece = str(choice.get("text") or choice.get("delta", {}).get("content") or "")
            if piece:
                self.last = time.monotonic()
                self.first = self.first or self.last
                self.text += piece
            return piece
        return ""


def request_body(manifest: Manifest, fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` (prompt or messages, and what else they say) and what they leave open as every demo has it."""
    return {
        "model": manifest.model.name, "max_tokens": min(MAX_TOKENS, manifest.model.max_position // 2), "seed": SEED,
        "temperature": TEMPERATURE, "stream": True, "stream_options": {"include_usage": True},
        "return_token_ids": True, **fields,
    }  # fmt: skip


def http_client() -> httpx.Client:
    """A client for any number of answers at once of our own gateway, past any proxy; making one takes longer than a
    token."""
    limits = httpx.Limits(max_connections=None)
    return httpx.Client(timeout=httpx.Timeout(30.0, connect=2.0), limits=limits, trust_env=False)


def streamed(
    http: httpx.Client,
    url: str,
    body: Mapping[str, Any],
    answer: Answer,
    *,
    retrying: Callable[[str], None] = lambda why: None,
) -> Generator[str, None, None]:
    """The pieces of the answer to `body` as they come; fills `answer`. Close it: the gateway then sees nobody reading.

    `retrying` hears of every interruption. Raises Refused when nothing will come, ServiceUnavailable when the answer
    ends with an error.
    """
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    events = resuming_stream(
        [url], path, body, patience_s=PATIENCE_S, retrying=retrying, accepted=answer.accepted, http=http
    )
    with contextlib.closing(events):
        for event in events:
            if "error" in event.data:
                raise ServiceUnavailable(f"the answer ended with an error: {event.data['error'].get('message')}")
            if piece := answer.take(event.data):
                yield piece


def cancel(http: httpx.Client, url: str, answer: Answer) -> None:
    """Ends the request now, if anybody knows it: one whose reader has only gone is kept for a while."""
    if answer.request:
        with contextlib.suppress(httpx.HTTPError):
            http.delete(f"{url}/v1/requests/{answer.request}")


def error_fields(refused: Refused) -> dict[str, Any]:
    """OpenAI's fields of a refusal: message, param and the like; a message alone where the gateway said nothing."""
    try:
        fields = json.loads(refused.error)["error"]
        return cast(dict[str, Any], {"message": refused.error, **fields})
    except (ValueError, KeyError, TypeError):
        return {"message": f"the gateway does not answer ({refused})"}


def one_line(error: Exception) -> str:
    """Why there is no answer, for people."""
    said = str(error_fields(error)["message"]) if isinstance(error, Refused) else str(error)
    return " ".join(said.split())

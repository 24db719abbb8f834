"""Requests one answer of the demo's system, streams, measures and cancels it."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import httpx

from blockrelay.block_folder.manifest import Manifest
from blockrelay.errors import ServiceUnavailable
from blockrelay_launcher.client.resuming import Refused, resuming_stream

MAX_TOKENS, SEED, TEMPERATURE = 320, 13, 0.7
#: Seconds without an event after which a request is given up.
PATIENCE_S = 60.0


@dataclass(slots=True)
class Answer:
    """One request and its answer so far."""

    asked_at: float
    """Time at which the request was sent, in seconds of the monotonic clock."""
    request_id: str = ""
    """Id of the request; empty until a gateway has accepted it."""
    first: float | None = None
    last: float | None = None
    """Seconds from the request to the first and the last text; None without one."""
    text: str = ""
    prompt_tokens: int = 0
    """Known at the end of the answer."""
    max_tokens: int = 0
    """The most new tokens, as the gateway has limited them to the context, from the first event of a chat; else 0."""
    tokens: int = 0
    """Tokens received so far."""
    reason: str = ""
    fingerprint: str = ""
    fallbacks: int = 0

    def take(self, chunk: Mapping[str, Any]) -> str:
        """Stores the fields of a chunk (completion or chat) and the time of its text, and returns the text.

        Call it when the chunk arrives. The answer must have a single choice.
        """
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
                self.last = time.monotonic() - self.asked_at
                self.first = self.first or self.last
                self.text += piece
            return piece
        return ""


def request_body(manifest: Manifest, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body of a request: `fields` (prompt or messages, sampling), with the demo's defaults for the rest."""
    return {
        "model": manifest.model.name, "max_tokens": min(MAX_TOKENS, manifest.model.max_position // 2), "seed": SEED,
        "temperature": TEMPERATURE, "stream": True, "stream_options": {"include_usage": True},
        "return_token_ids": True, **fields,
    }  # fmt: skip


def write(text: str) -> None:
    """Writes a piece of an answer to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def http_client() -> httpx.Client:
    """Returns a client for any number of requests at once to a local gateway, without a proxy.

    Making one takes longer than a token: share it.
    """
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
    """Yields the pieces of the answer to `body` as they come, and fills `answer`.

    Close the generator to disconnect. `retrying` is called with the cause of every interruption. Raises Refused if no
    answer will come, ServiceUnavailable if the answer ends with an error.
    """
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"

    def accepted(request_id: str) -> None:
        answer.request_id = request_id

    events = resuming_stream([url], path, body, patience_s=PATIENCE_S, retrying=retrying, accepted=accepted, http=http)
    with contextlib.closing(events):
        for event in events:
            if "error" in event.data:
                raise ServiceUnavailable(f"the answer ended with an error: {event.data['error'].get('message')}")
            if piece := answer.take(event.data):
                yield piece


def cancel(http: httpx.Client, url: str, answer: Answer) -> None:
    """Cancels the request, if it was accepted; HTTP errors are ignored.

    A request whose reader only disconnects is kept for a while.
    """
    if answer.request_id:
        with contextlib.suppress(httpx.HTTPError):
            http.delete(f"{url}/v1/requests/{answer.request_id}")


def error_fields(refused: Refused) -> dict[str, Any]:
    """Returns OpenAI's fields of a refusal (message, param, ...); only a message if the gateway sent none."""
    try:
        fields = json.loads(refused.error)["error"]
        return cast(dict[str, Any], {"message": refused.error, **fields})
    except (ValueError, KeyError, TypeError):
        return {"message": f"the gateway does not answer ({refused})"}


def one_line(error: Exception) -> str:
    """Returns the cause of a failed request as one line for people."""
    message = str(error_fields(error)["message"]) if isinstance(error, Refused) else str(error)
    return " ".join(message.split())

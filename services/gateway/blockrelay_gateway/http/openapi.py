"""The answers in /openapi.json: every status that a route may give, with its body."""

from typing import Any

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """`param` names the field that is wrong; `code` is for programs, `message` for people."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """OpenAI's error shape. /v1/infer adds the fields of its own."""

    error: ErrorDetail


_MEANINGS = {
    400: "a field is wrong, unknown or not supported; nothing was queued",
    401: "the API key is missing or unknown",
    403: "sent by a web page of another site; see --cors-origins",
    404: "no such model, request or session",
    405: "the route does not take this method",
    408: "the body did not arrive in time",
    409: "the session expects another step",
    413: "the body is over the limit",
    421: "sent to a name that is not ours; see --allowed-hosts",
    422: "the Idempotency-Key was used with another body",
    429: "over the quota of the API key; see Retry-After",
    500: "a block failed for this request, or the gateway did",
    503: "over capacity, or a service is not available; see Retry-After",
    504: "the request's timeout passed before it was finished",
}
#: For FastAPI's `responses`: the errors that every route may answer.
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": Error, "description": meaning} for status, meaning in _MEANINGS.items()
}
_STREAM: dict[str, Any] = {"text/event-stream": {}}  # no schema: tools disagree if it describes the body or an event
#: Answers of routes that make a request: an answer, a stream of events, or the id of a background request.
WORK: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    200: {"description": "the whole answer, or with `stream` its events", "content": _STREAM},
    202: {"description": "accepted in the background; read it under /v1/requests"},
}
#: Answers of routes that only stream events.
EVENTS: dict[int | str, dict[str, Any]] = {**ERRORS, 200: {"description": "the events", "content": _STREAM}}

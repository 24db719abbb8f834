"""The answers in /openapi.json: every status that a route may give, with its body.

The bodies of answers are in `blockrelay_gateway.api.answers`.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict


class ErrorDetail(BaseModel):
    """`param` names the field that is wrong; `code` is for programs, `message` for people."""

    model_config = ConfigDict(extra="forbid")

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """OpenAI's error shape. /v1/infer adds the fields of its own."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorDetail


#: FastAPI's `responses`: what is known of each answer, by its status.
Responses = dict[int | str, dict[str, Any]]
_MEANINGS = {
    400: "a field is wrong, unknown or not supported; nothing was queued",
    401: "the API key is missing or unknown",
    403: "sent by a web page of another site; see --cors-origins",
    404: "no such model, request or session",
    405: "the route does not take this method",
    408: "the body did not arrive in time",
    409: "the session expects another step",
    413: "the body is over the limit",
    415: "the body is compressed",
    421: "sent to a name that is not ours; see --allowed-hosts",
    422: "the Idempotency-Key was used with another body",
    429: "over the quota of the API key; see Retry-After",
    500: "a block failed for this request, or the gateway did",
    503: "over capacity, or a service is not available; see Retry-After",
    504: "the request's timeout passed before it was finished",
}


def errors(model: type[Error]) -> Responses:
    """Returns the errors that any route may answer, in the form `model`."""
    return {status: {"model": model, "description": meaning} for status, meaning in _MEANINGS.items()}


#: For FastAPI's `responses`: the errors that every route may answer.
ERRORS = errors(Error)


def answer(model: Any) -> Responses:
    """Returns the answer of a route, `model`; errors are those of its router."""
    return {200: {"model": model, "description": "the answer"}}


def probe(model: Any) -> Responses:
    """Returns the answers of a probe, which has one form for both 200 and 503; the gateway may refuse it too."""
    return {**answer(model), 503: {"model": model | Error, "description": "not ready, or over capacity"}}


def work(whole: Any, queued: Any) -> Responses:
    """Returns the answers of a route that makes a request: the `whole` answer, or that `queued` in the background.

    With `stream`, the answer is events. They have no schema: tools disagree if it describes the body or an event.
    """
    return {
        200: {"model": whole, "description": "the whole answer, or with `stream` its events", "content": _stream()},
        202: {"model": queued, "description": "accepted in the background; read it under /v1/requests"},
    }


def events() -> Responses:
    """Returns the answer of a route that only streams events."""
    return {200: {"description": "the events", "content": _stream()}}


def _stream() -> dict[str, Any]:
    return {"text/event-stream": {}}  # a new one each time: FastAPI writes into it

"""Turns service errors into HTTP answers: status, headers and OpenAI's error shape. Nothing else does."""

import json
import sys
from collections.abc import Callable, Sequence
from random import uniform
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from blockrelay.errors import (
    BadRequest,
    BlockrelayError,
    Cancelled,
    Conflict,
    ContextLengthExceeded,
    DeadlineExceeded,
    ExecutionError,
    FallbackDenied,
    FallbackTooSlow,
    ForeignOrigin,
    KeyReused,
    LimitExceeded,
    NotFound,
    NumericsChanged,
    RedisFull,
    RedisTrouble,
    RequestError,
    RequestTooLarge,
    RequestTooSlow,
    ServiceUnavailable,
    Unauthorized,
    UnknownHost,
    UnsupportedEncoding,
)
from blockrelay.observability import logs
from blockrelay.observability.metrics.gateway import NEW_REQUESTS, GatewayMetrics
from blockrelay_gateway.policy import RETRY_AFTER_MAX_S, RETRY_AFTER_MIN_S, RETRY_AFTER_SPREAD

#: Status, type and code of the answer, and the reason in `blockrelay_refused_requests_total`, by the error's class; the
#: first row that fits counts. A limit's reason is its own name.
_BY_TYPE: tuple[tuple[type[BlockrelayError], int, str, str | None, str], ...] = (
    (RequestTooLarge, 413, "invalid_request_error", "request_too_large", "too_long"),
    (RequestTooSlow, 408, "invalid_request_error", "request_timeout", "slow_client"),
    (UnsupportedEncoding, 415, "invalid_request_error", "unsupported_encoding", "malformed"),
    (ContextLengthExceeded, 400, "invalid_request_error", "context_length_exceeded", "too_long"),
    (BadRequest, 400, "invalid_request_error", None, "malformed"),
    (Unauthorized, 401, "invalid_request_error", "invalid_api_key", "unauthorized"),
    (ForeignOrigin, 403, "invalid_request_error", "foreign_origin", "unauthorized"),
    (UnknownHost, 421, "invalid_request_error", "unknown_host", "unauthorized"),
    (NotFound, 404, "invalid_request_error", "not_found", "not_found"),
    (Conflict, 409, "invalid_request_error", "conflict", "conflict"),
    (KeyReused, 422, "idempotency_error", "idempotency_key_reused", "conflict"),
    (RequestError, 400, "invalid_request_error", None, "malformed"),
    (LimitExceeded, 503, "overloaded_error", "overloaded", ""),
    (RedisFull, 503, "overloaded_error", "overloaded", "redis_memory"),
    (RedisTrouble, 503, "server_error", "unavailable", "redis"),
    (ServiceUnavailable, 503, "server_error", "unavailable", "unavailable"),
    (DeadlineExceeded, 504, "timeout_error", "expired", "expired"),
    (Cancelled, 499, "cancelled_error", "cancelled", "cancelled"),
    (NumericsChanged, 500, "server_error", "numerics_changed", "failed"),
    (FallbackDenied, 500, "server_error", "fallback_denied", "failed"),
    (FallbackTooSlow, 500, "server_error", "fallback_too_slow", "failed"),
    (ExecutionError, 500, "server_error", "execution_failed", "failed"),
    (BlockrelayError, 500, "server_error", None, "failed"),
)
#: Errors with `x-should-retry: false`: by their status, OpenAI's clients would repeat the request, in vain.
IN_VAIN = (ExecutionError, DeadlineExceeded)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
#: The most digits of a whole number that Python reads: more would take minutes.
MAX_DIGITS = sys.get_int_max_str_digits()


def retry_after_s(wait_ms: int) -> int:
    """Retry-After in whole seconds: `wait_ms` within bounds, times a random factor from 1 to RETRY_AFTER_SPREAD."""
    return round(min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, wait_ms / 1000)) * uniform(1, RETRY_AFTER_SPREAD))


class JsonAnswer(Response):
    """A JSON response that takes any text: half a surrogate pair is written as its JSON escape."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encodes `content` with `to_json`."""
        return to_json(content)


def to_json(content: Any) -> bytes:
    """Encodes `content` as compact UTF-8 JSON. Raises ValueError for NaN and infinity."""
    return _ENCODER.encode(content).encode("utf-8", "backslashreplace")


def status_of(error: BlockrelayError) -> int:
    """The HTTP status of an error."""
    return _row(error)[0]


def _row(error: BlockrelayError) -> tuple[int, str, str | None, str]:
    """Status, type and code of the answer to an error, and the reason for metrics."""
    if isinstance(error, LimitExceeded) and error.scope == "client":
        return 429, "rate_limit_error", "rate_limit_exceeded", error.limit
    return next(row[1:] for row in _BY_TYPE if isinstance(error, row[0]))


def error_body(error: BlockrelayError, message: str = "") -> dict[str, Any]:
    """The error in OpenAI's shape: `{"error": {message, type, param, code}}`, with its own message or another one."""
    _, kind, code, _ = _row(error)
    param = error.param if isinstance(error, RequestError) else None
    if isinstance(error, NotFound) and param == "model":
        code = "model_not_found"
    return _body(message or message_of(error), kind, param, code)


def _body(
    message: str, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def wrong_method(path: str, method: str, allowed: Sequence[str]) -> JsonAnswer:
    """The answer 405 for a path that takes only the methods `allowed`."""
    takes = ", ".join(allowed)
    body = _body(f"{path} does not take {method}, only {takes}")
    return JsonAnswer(body, status_code=405, headers={"allow": takes})


def reason_of(error: BlockrelayError) -> str:
    """The reason of a refusal in one word, for metrics; the limit's name if a limit was exceeded."""
    return error.limit if isinstance(error, LimitExceeded) else _row(error)[3]


def headers_of(error: BlockrelayError) -> dict[str, str]:
    """The header of an answer with this error: Retry-After, WWW-Authenticate or X-Should-Retry; for others none."""
    if isinstance(error, LimitExceeded):
        return {"retry-after": str(error.retry_after_s)}
    if isinstance(error, ServiceUnavailable):
        return {"retry-after": "1"}
    if isinstance(error, Unauthorized):
        return {"www-authenticate": "Bearer"}
    return {"x-should-retry": "false"} if isinstance(error, IN_VAIN) else {}


def message_of(error: BlockrelayError) -> str:
    """The message for the client. Redis' address and its own message are only for the gateway's log."""
    if isinstance(error, RedisFull):
        return "the queue's memory is used up; try again later"
    if isinstance(error, RedisTrouble) and error.code == "PROTOCOL":
        return "the cell is of another release than this gateway, or new; try again later"
    return "the queue (Redis) does not answer; try again later" if isinstance(error, RedisTrouble) else str(error)


def from_validation(errors: Sequence[Any]) -> BadRequest:
    """The first of pydantic's validation `errors`, at least one, as BadRequest with the field's name."""
    first = errors[0]
    location = [str(part) for part in first["loc"]]
    if location and location[0] in ("body", "query", "header"):  # FastAPI's prefix, no part of the client's field name
        location.pop(0)
    kind, message = first["type"], str(first["msg"])
    if kind == "json_invalid":
        return BadRequest(f"the body is not JSON: {first.get('ctx', {}).get('error', message)}")
    # A union adds the names of its members to the location; fields and indexes come before them.
    names = [part for part in location if part.isidentifier() or part.isdigit() or not part.isascii() or "." in part]
    while len(names) > 1 and names[-1] in ("str", "int", "float", "bool", "list"):
        names.pop()
    param = ".".join(names) or None
    if kind == "extra_forbidden":
        return BadRequest(f"unknown field {param}", param=param)
    if kind == "missing":
        return BadRequest(f"{param} is missing" if param else "the body is empty: send a JSON object", param=param)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return BadRequest(f"{param or 'the body'} must be a JSON object", param=param)
    return BadRequest(f"{param or 'the body'}: {message}", param=param)


def unreadable(cause: BaseException | None, what: str = "body") -> BadRequest:
    """The error for a body or message (`what`) that is not JSON, by the parser's exception; None: no exception."""
    if isinstance(cause, UnicodeDecodeError):
        at = f"byte 0x{cause.object[cause.start]:02x} at {cause.start}"
        return BadRequest(f"the {what} is not {cause.encoding.upper()} text ({at}): send JSON as UTF-8")
    if isinstance(cause, json.JSONDecodeError):
        where = f" at {cause.pos}" if what == "message" else ""
        return BadRequest(f"the {what} is not JSON: {cause.msg}{where}")
    if isinstance(cause, RecursionError):
        return BadRequest(f"the {what} cannot be read as JSON: its lists and objects are nested too deeply")
    if isinstance(cause, ValueError):  # the only other ValueError of the parser
        return BadRequest(f"the {what} cannot be read as JSON: a whole number in it has more than {MAX_DIGITS} digits")
    return BadRequest(f"the {what} cannot be read as JSON")


class ErrorResponder:
    """Turns errors into responses, and counts and logs refused new requests."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._rejections, self._limited, self._refused = metrics.rejections, metrics.limited, metrics.refused
        self._unread = metrics.refused_unread

    def answer(self, scope: Scope, error: BlockrelayError) -> Response:
        """The response for `error`, in the shape of its route; for /v1/infer with `session_id` of the scope's state.

        `scope` is that of an HTTP request. If it is a POST of a new request, the refusal is counted and logged, and
        kept as `refusal` in the scope's state.
        """
        path = scope["path"]
        if scope["method"] == "POST" and path in NEW_REQUESTS:
            self.count(path, error)
            scope.setdefault("state", {})["refusal"] = error
        body = (
            infer_error(error, scope.get("state", {}).get("session_id")) if path == "/v1/infer" else error_body(error)
        )
        return _answer(error, body)

    async def refuse(self, error: BlockrelayError, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request or a WebSocket handshake with `error`; no body is read and no socket opened."""
        if scope["type"] == "http":
            await self.answer(scope, error)(scope, receive, send)
        elif "websocket.http.response" in scope.get("extensions", {}):
            await self.answer({**scope, "method": "GET"}, error)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008, "reason": str(error)})

    async def refuse_unread(self, error: LimitExceeded, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a new request with the last refusal of its client, without reading it: counted, and not logged."""
        self._count(scope["path"], error)
        self._unread.inc()
        message = f"too many requests of this client were refused just now, so this one was not read; the last: {error}"
        await _answer(error, error_body(error, message))(scope, receive, send)

    def count(self, path: str, error: BlockrelayError) -> None:
        """Counts and logs a new request that was refused."""
        self._count(path, error)
        param = error_body(error)["error"]["param"]
        logs.get().info("REQUEST_REJECTED", path=path, status=status_of(error), param=param)

    def _count(self, path: str, error: BlockrelayError) -> None:
        self._rejections.labels(str(status_of(error))).inc()
        self._refused.labels(path, reason_of(error)).inc()
        if isinstance(error, LimitExceeded):
            self._limited.labels(error.limit).inc()


def _answer(error: BlockrelayError, body: dict[str, Any]) -> JsonAnswer:
    return JsonAnswer(body, status_code=status_of(error), headers=headers_of(error))


def install(app: FastAPI, responder: ErrorResponder, on_error: Callable[[RedisTrouble], None]) -> None:
    """Adds the error handlers to `app`, also one that answers 500 to every other exception, without its message.

    `on_error` is called for each Redis error that a client gets.
    """

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, BlockrelayError)
        return responder.answer(request.scope, error)

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        sent: object = error.body
        if isinstance(sent, dict) and isinstance(sent.get("session_id"), str):
            request.state.session_id = sent["session_id"]
        return responder.answer(request.scope, from_validation(error.errors()))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return responder.answer(request.scope, NotFound(f"there is no {request.method} {request.url.path}"))
        if error.status_code == 400:
            return responder.answer(request.scope, unreadable(error.__cause__))
        return JsonAnswer(_body(str(error.detail)), status_code=error.status_code, headers=error.headers)

    async def queue(request: Request, error: Exception) -> Response:
        assert isinstance(error, RedisTrouble)
        on_error(error)
        return responder.answer(request.scope, error)

    async def bug(request: Request, error: Exception) -> Response:
        return responder.answer(request.scope, BlockrelayError("internal error; the gateway's log says more"))

    app.add_exception_handler(BlockrelayError, ours)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RedisTrouble, queue)
    app.add_exception_handler(Exception, bug)


def infer_error(
    error: BlockrelayError,
    session_id: str | None = None,
    *,
    message: str | None = None,
    error_type: str | None = None,
    failed_block: str | None = None,
    successful_blocks: Sequence[str] = (),
    failed_blocks: Sequence[dict[str, Any]] = (),
    **more: Any,
) -> dict[str, Any]:
    """The error in the shape of /v1/infer, which includes OpenAI's shape.

    Without block arguments it is that of a request that never ran. `message` and `error_type` replace those of `error`,
    but not in OpenAI's shape. `more` has further fields of the object.
    """
    return {
        "status": "error",
        "message": message or message_of(error),
        "session_id": session_id,
        "failed_block": failed_block,
        "error_type": error_type or type(error).__name__,
        "successful_blocks": list(successful_blocks),
        "failed_blocks": list(failed_blocks),
        **more,
        **error_body(error),
    }

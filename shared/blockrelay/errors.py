"""All exceptions that one part of Blockrelay raises for another.

    BlockrelayError
    ├── UsageError                 a command line, a setting or a checkpoint asks for something impossible
    │   └── UnsupportedModel       a checkpoint has a feature the converter lacks (`field` names it)
    ├── BlockFolderError           a block folder is incomplete, altered or points outside itself; refuse to start
    │   ├── KnownAnswerMismatch    a block computes other bits here than when it was converted
    │   └── OnnxBlocksError        ONNX blocks made by others do not fit together (`file` and `tensor` name where)
    ├── RequestError               a client's request is wrong (`param` names the field); nothing was queued; HTTP 4xx
    │   ├── BadRequest             a field is wrong; 400
    │   │   ├── ContextLengthExceeded  the prompt leaves no room in the model's context; 400
    │   │   ├── RequestTooLarge    body over the limit; 413
    │   │   ├── UnsupportedEncoding  body is compressed; 415
    │   │   └── RequestTooSlow     body did not arrive in time; 408
    │   ├── Unauthorized           no API key, or an unknown one; 401
    │   ├── ForeignOrigin          from a web page of a site that is not allowed; 403
    │   ├── UnknownHost            sent to a host name that the gateway does not answer to; 421
    │   ├── NotFound               unknown model, request or session; 404
    │   ├── Conflict               wrong session step; 409
    │   └── KeyReused              an Idempotency-Key came with another body before; 422
    ├── LimitExceeded              a limit of the client (HTTP 429) or of the cell (503) is used up; try again later
    ├── Cancelled                  a request was cancelled before it was finished; HTTP 499
    ├── DeadlineExceeded           the request's timeout passed before it was finished; HTTP 504
    ├── WireError                  bytes from a queue, a page or a client are not what they claim to be
    ├── OutOfPages                 a worker's pool has fewer free KV pages than requested; never leaves the worker
    ├── ExecutionError             running a stage failed (`block` names where); HTTP 500
    │   ├── RowNotFinite           a hidden state of one request is NaN or infinite: it fails, its batch does not
    │   ├── DeviceFailed           a GPU could not compute a batch, but still works (`capacity`: a smaller one may do)
    │   ├── DeviceLost             a GPU or its process is gone, with all that was on it
    │   ├── NumericsChanged        no worker of its numerics id is left, and the request is `exact`
    │   ├── FallbackDenied         a GPU failed, no other came, and the request denies a fallback to CPUs
    │   └── FallbackTooSlow        a GPU failed, and a CPU is predicted to be slower than the request allows
    ├── IllegalTransition          a state machine got an event that its state does not allow: a bug, never caught
    └── ServiceUnavailable         a dependency (Redis, worker) is not there; HTTP 503
        └── RedisTrouble           Redis does not do what it should, but not because of a bug: wait, or reject work
            ├── RedisUnavailable   it is away, loads, is busy or fails over
            ├── RedisFull          its memory is used up
            └── RedisRefused       it cannot save, or refuses the user: an operator has to change something

Each message is one line that says what happened, to which block or request, and what the user can do.

Where they are caught: `exit_codes.exit_code` chooses the exit code of commands and services, and
`blockrelay_gateway.http.errors` the answers to clients. An engine runs the requests of an ExecutionError again or ends
them. Each loop that uses Redis waits while it gets RedisTrouble. Code that decodes bytes of another process catches
WireError: it refuses the one entry and goes on.

An exception that is used within one module only is defined there.
"""

import time
from collections.abc import Mapping
from typing import Literal


class BlockrelayError(Exception):
    """The base class of all errors here. `str(error)` is one line for users."""


class UsageError(BlockrelayError):
    """A command line, a setting or a checkpoint asks for something impossible."""


class NoDeviceMemory(UsageError):
    """A stage does not fit into the memory that it may use on a device."""


class UnsupportedModel(UsageError):
    """The checkpoint needs a feature that Blockrelay lacks. `field` is the field of its config that asks for it."""

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class BlockFolderError(BlockrelayError):
    """A block folder is incomplete, altered, or its manifest points outside the folder."""


class KnownAnswerMismatch(BlockFolderError):
    """A block computes other bits than its known answer, or a device is further from it than is allowed.

    `block` is the block's name (`block_7`); the first one's if several were computed together.
    """

    def __init__(self, message: str, *, block: str) -> None:
        super().__init__(message)
        self.block = block


class OnnxBlocksError(BlockFolderError):
    """ONNX blocks made by others are incomplete, altered, or do not fit together.

    The message begins with `file` and `tensor` if they are known. It is one line even if a name has line breaks.
    """

    def __init__(self, message: str, *, file: str | None = None, tensor: str | None = None) -> None:
        parts = (one if len(one) < 1000 else f"{one[:1000]}..." for one in (file, tensor, message) if one is not None)
        super().__init__("".join(letter if letter.isprintable() else "?" for letter in ": ".join(parts)))
        self.file, self.tensor = file, tensor


class RequestError(BlockrelayError):
    """A client's request is wrong and was refused; nothing was queued.

    `param` is the name of the wrong field as the client spelt it, or None for the request as a whole.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class BadRequest(RequestError):
    """A request field is wrong, or the body as a whole."""


class ContextLengthExceeded(BadRequest):
    """The prompt leaves no room for a token in the model's context."""


class RequestTooLarge(BadRequest):
    """The body is over the configured limit."""


class UnsupportedEncoding(BadRequest):
    """The body is compressed, which the gateway does not support."""


class RequestTooSlow(BadRequest):
    """The body did not arrive in time."""


class Unauthorized(RequestError):
    """The request has no API key, or an unknown one."""


class ForeignOrigin(RequestError):
    """The request came from a web page of a site that may not use this gateway."""


class UnknownHost(RequestError):
    """The request was sent to a host name that this gateway does not answer to."""


class NotFound(RequestError):
    """The model, request or session does not exist."""


class Conflict(RequestError):
    """The session step is neither the next one nor a repeat of the last one."""


class KeyReused(RequestError):
    """The Idempotency-Key was used with another body before."""


class LimitExceeded(BlockrelayError):
    """A limit of the client (`scope` "client") or of the cell or this gateway ("cell") is used up.

    `limit` is its name. `retry_after_s` is the time in seconds after which to try again.
    """

    def __init__(self, message: str, *, scope: Literal["client", "cell"], limit: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.scope, self.limit, self.retry_after_s = scope, limit, retry_after_s


class Cancelled(BlockrelayError):
    """The request was cancelled before it was finished."""


class DeadlineExceeded(BlockrelayError):
    """The request's timeout passed before it was finished."""


class WireError(BlockrelayError):
    """Bytes do not decode to what they claim: wrong dtype, shape, length or version."""


class GrammarEnded(BlockrelayError):
    """A text cannot go on by its grammar: the work on the next token exceeds a limit, for example."""


class OutOfPages(BlockrelayError):
    """A worker's pool has fewer free KV pages than requested."""


class ExecutionError(BlockrelayError):
    """Running a stage failed. `block` is the name of the block that failed (`block_7`), or None if it is not known.

    `seconds` has the time of each block that ran, by its name, in order; the last one is the block that failed. It is
    empty where times were not measured.
    """

    def __init__(self, message: str, *, block: str | None = None, seconds: Mapping[str, float] | None = None) -> None:
        super().__init__(message)
        self.block = block
        self.seconds: Mapping[str, float] = seconds or {}


#: The result of a device, for clients; `OK` if it computed. A more precise reason stands beside it.
ErrorCode = Literal["OK", "TIMEOUT", "OOM", "INTERNAL"]
#: The error codes of a device that failed.
DeviceCode = Literal["TIMEOUT", "OOM", "INTERNAL"]


class DeviceFailed(ExecutionError):
    """A device refused a batch and still works. `capacity`: it had no memory for it, so a smaller one may work.

    `reason` is more precise than `code`, out_of_memory for example.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        code: DeviceCode,
        capacity: bool,
        block: str | None = None,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(message, block=block, seconds=seconds)
        self.reason, self.capacity = reason, capacity
        self.code: DeviceCode = code


class DeviceLost(ExecutionError):
    """A device, or the process that uses it, is gone. `moment` is when this was noticed, by time.monotonic.

    `reason` is more precise than `code`, hang for example.
    """

    def __init__(self, message: str, *, reason: str, code: DeviceCode, block: str | None = None) -> None:
        super().__init__(message, block=block)
        self.reason, self.moment = reason, time.monotonic()
        self.code: DeviceCode = code


class RowNotFinite(ExecutionError):
    """A hidden state of a request became NaN or infinite."""


class NumericsChanged(ExecutionError):
    """No worker of a request's numerics id is left, and the request may not continue under another one."""


class FallbackDenied(ExecutionError):
    """A request's GPU failed, no other became available in time, and the request may not continue on a CPU."""


class FallbackTooSlow(ExecutionError):
    """A request's GPU failed, and a CPU is not known to be as fast as the request's `max_slowdown` demands."""


class IllegalTransition(BlockrelayError):
    """A state machine got an event that its state does not allow."""


class ServiceUnavailable(BlockrelayError):
    """Redis or another service that this one needs does not answer."""


class RedisTrouble(ServiceUnavailable):
    """Redis does not do what it should, but not because of a bug. Only clients of `blockrelay.redis.client` raise it.

    `code` is the first word of Redis' answer (`OOM`, `NOPERM`); empty when there was no answer. `cell` is the cell of
    that Redis, if the client was made for one.
    """

    cell: str | None = None
    says = "Redis does not do what it should"

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.code = code

    @property
    def plainly(self) -> str:
        """The problem in words for every client: without addresses and names of users or keys."""
        if self.code == "PROTOCOL":
            return str(self)
        return f"{self.says} ({self.code})" if self.code else self.says


class RedisUnavailable(RedisTrouble):
    """Redis is away, loads its data, is busy with a script, or fails over."""

    says = "Redis does not answer"


class RedisFull(RedisTrouble):
    """Redis' memory is used up, so that it refuses writes."""

    says = "Redis is full"


class RedisRefused(RedisTrouble):
    """Redis cannot save to its disk, or refuses the user: an operator has to change something."""

    says = "Redis refuses"

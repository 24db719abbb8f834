"""Every exception that one part of Blockrelay raises for another.

    BlockrelayError
    ├── UsageError                 a command line, a setting or a checkpoint asks for something impossible
    │   └── UnsupportedModel       a checkpoint has a feature the converter lacks (`field` names it)
    ├── BlockFolderError           a block folder is incomplete, altered or points outside itself; refuse to start
    │   ├── KnownAnswerMismatch    a block computes other bits here than when it was converted
    │   └── OnnxBlocksError        ONNX blocks that others made do not fit together (`file` and `tensor` name where)
    ├── RequestError               a client's request is refused for what it is; nothing was queued; HTTP 4xx
    │   ├── BadRequest             a field is wrong (`param` names it); 400
    │   │   ├── RequestTooLarge    body over the limit; 413
    │   │   └── RequestTooSlow     body did not arrive in time; 408
    │   ├── Unauthorized           no API key, or an unknown one; 401
    │   ├── ForeignOrigin          a web page of another site, which is not listed; 403
    │   ├── UnknownHost            sent to a name that is not ours; 421
    │   ├── NotFound               unknown model, request or session; 404
    │   ├── Conflict               wrong session step; 409
    │   └── KeyReused              an Idempotency-Key came with another body before; 422
    ├── LimitExceeded              a limit of the client (HTTP 429) or of the cell (503) is used up; try again later
    ├── Cancelled                  somebody ended the request before it was finished; HTTP 499
    ├── DeadlineExceeded           the request's timeout passed before it was finished; HTTP 504
    ├── WireError                  bytes from a queue, a page or a client are not what they claim to be
    ├── OutOfPages                 a worker's pool has fewer free KV pages than were asked for; never leaves the worker
    ├── ExecutionError             running a stage failed (`block` names where); HTTP 500
    │   ├── RowNotFinite           one request's row is NaN or infinite: that request fails, its batch does not
    │   ├── DeviceFailed           a GPU could not compute a batch (`capacity`: less at once may do), and is still there
    │   ├── DeviceLost             a GPU or its process is gone, with all that was on it
    │   ├── NumericsChanged        no worker of its numerics id is left, and the request asked for `exact`
    │   └── FallbackDenied         a GPU failed, no other came, and the request keeps off CPUs
    ├── IllegalTransition          a state machine was told what its state does not allow: a bug of ours, never caught
    └── ServiceUnavailable         a dependency (Redis, worker) is not there; HTTP 503
        └── RedisTrouble           Redis does not do what we ask, and no bug of ours is why: wait, or shed
            ├── RedisUnavailable   it is away, loads, is busy or fails over
            ├── RedisFull          its memory is used up
            └── RedisRefused       it cannot save, or does not let us: somebody has to change something

Each message is one line that says what happened, to which block or request, and what the user can do.

Where they are caught: `exit_codes.exit_code` decides for every command and service what a process ends with, and
`blockrelay_gateway.http.errors` for every answer what a client is told; an engine runs the requests of an
ExecutionError again or ends them. RedisTrouble is waited out by every loop that talks to Redis, and WireError is caught
where bytes of another process are decoded: the one entry is refused, the process goes on.

Exceptions that only steer their own module are defined there: they end a task group or a thread and reach nobody else.
"""

import time
from collections.abc import Mapping
from typing import Literal


class BlockrelayError(Exception):
    """Root of the tree. `str(error)` is one line fit for a user."""


class UsageError(BlockrelayError):
    """A command line, a setting or a checkpoint asks for something impossible."""


class UnsupportedModel(UsageError):
    """The checkpoint uses something we do not compute. `field` is the config field that says so."""

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class BlockFolderError(BlockrelayError):
    """A block folder is incomplete, altered, or its manifest points outside the folder."""


class KnownAnswerMismatch(BlockFolderError):
    """A block's output for the fixed input differs from the hash stored at conversion."""

    def __init__(self, message: str, *, block: str) -> None:
        super().__init__(message)
        self.block = block


class OnnxBlocksError(BlockFolderError):
    """ONNX blocks that others made are incomplete, altered, or do not fit together. The message begins with `file` and
    `tensor`, those that are known; it is one line whatever names others gave."""

    def __init__(self, message: str, *, file: str | None = None, tensor: str | None = None) -> None:
        parts = (one if len(one) < 1000 else f"{one[:1000]}..." for one in (file, tensor, message) if one is not None)
        super().__init__("".join(letter if letter.isprintable() else "?" for letter in ": ".join(parts)))
        self.file, self.tensor = file, tensor


class RequestError(BlockrelayError):
    """A client's request is refused for what it is."""


class BadRequest(RequestError):
    """A request field is wrong. `param` is the field's name as the client spelt it, or None for the body as a whole."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(BadRequest):
    """The prompt leaves no room for a token in the model's context."""


class RequestTooLarge(BadRequest):
    """The body is over the configured limit."""


class UnsupportedEncoding(BadRequest):
    """The body is compressed, which is not read."""


class RequestTooSlow(BadRequest):
    """The body did not arrive in time."""


class Unauthorized(RequestError):
    """No API key, or an unknown one."""


class ForeignOrigin(RequestError):
    """Sent by a web page of a site that may not use this gateway."""


class UnknownHost(RequestError):
    """Sent to a name that this gateway does not answer to."""


class NotFound(RequestError):
    """Unknown model, request or session."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Conflict(RequestError):
    """A session step that is neither the next one nor a repeat of the last one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class KeyReused(RequestError):
    """The Idempotency-Key is taken: it came with another body before."""


class LimitExceeded(BlockrelayError):
    """A limit is used up: of the client (`scope` "client") or of the cell and this gateway ("cell").

    `limit` names which it was, `retry_after_s` is a hint in seconds.
    """

    def __init__(self, message: str, *, scope: Literal["client", "cell"], limit: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.scope, self.limit, self.retry_after_s = scope, limit, retry_after_s


class Cancelled(BlockrelayError):
    """The request was ended before it was finished."""


class DeadlineExceeded(BlockrelayError):
    """The request's timeout passed before it was finished."""


class WireError(BlockrelayError):
    """Bytes do not decode to what they claim: wrong dtype, shape, length or version."""


class OutOfPages(BlockrelayError):
    """A worker's pool has fewer free KV pages than were asked for."""


class ExecutionError(BlockrelayError):
    """Running a stage failed. `block` names the block (`block_7`), or None when no single block is to blame.

    `seconds` are what blocks of the stage took by name, in order: those that ran well, and last the one that failed;
    empty where nobody measured them.
    """

    def __init__(self, message: str, *, block: str | None = None, seconds: Mapping[str, float] | None = None) -> None:
        super().__init__(message)
        self.block = block
        self.seconds: Mapping[str, float] = seconds or {}


#: What clients read of how a device did, with `OK` for one that computed; a finer reason stands beside it.
ErrorCode = Literal["OK", "TIMEOUT", "OOM", "INTERNAL"]
#: The same of one that failed.
DeviceCode = Literal["TIMEOUT", "OOM", "INTERNAL"]


class DeviceFailed(ExecutionError):
    """A device refused a batch, or had no room for it (`capacity`). `reason` is finer, such as out_of_memory."""

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
    """The process of a device is gone, or the device. `moment` is when that was seen, by time.monotonic."""

    def __init__(self, message: str, *, reason: str, code: DeviceCode, block: str | None = None) -> None:
        super().__init__(message, block=block)
        self.reason, self.moment = reason, time.monotonic()
        self.code: DeviceCode = code


class RowNotFinite(ExecutionError):
    """A request's row became NaN or infinite."""


class NumericsChanged(ExecutionError):
    """No worker of a request's numerics id is left, and it may not go on under another one."""


class FallbackDenied(ExecutionError):
    """A request's GPU failed, no other one came for a while, and it may not go on at a CPU."""


class IllegalTransition(BlockrelayError):
    """A state machine was told an event that its state does not allow."""


class ServiceUnavailable(BlockrelayError):
    """A service we depend on does not answer."""


class RedisTrouble(ServiceUnavailable):
    """Redis does not do what we ask, and no bug of ours is why. Only clients of `blockrelay.redis.client` raise it.

    `code` is the first word of Redis' answer (`OOM`, `NOPERM`); empty when there was no answer. `cell`: whose Redis it
    is, if the client was told.
    """

    cell: str | None = None
    says = "Redis does not do what it should"

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.code = code

    @property
    def plainly(self) -> str:
        """What may be said to all who ask: no address, and no name of a user or a key."""
        if self.code == "PROTOCOL":
            return str(self)
        return f"{self.says} ({self.code})" if self.code else self.says


class RedisUnavailable(RedisTrouble):
    """Redis is away, loads its data, is busy with a script, or fails over."""

    says = "Redis does not answer"


class RedisFull(RedisTrouble):
    """Redis' memory is used up: it takes nothing new."""

    says = "Redis is full"


class RedisRefused(RedisTrouble):
    """Redis cannot save what it is given, or our user may not do this: somebody has to change something."""

    says = "Redis refuses"

"""Every exception Blockrelay raises on purpose.

    BlockrelayError
    ├── UsageError                 the caller asked for something impossible; exit code 2, or HTTP 400
    │   ├── BadRequest             a request field is wrong (`param` names it); nothing was queued
    │   │   ├── RequestTooLarge    body over the limit; HTTP 413
    │   │   └── RequestTooSlow     body did not arrive in time; HTTP 408
    │   ├── Unauthorized           no API key, or an unknown one; HTTP 401
    │   ├── ForeignOrigin          a web page of another site, which is not listed; HTTP 403
    │   ├── UnknownHost            sent to a name that is not ours; HTTP 421
    │   ├── NotFound               unknown model, request or session; HTTP 404
    │   ├── Conflict               wrong session step; HTTP 409
    │   ├── KeyReused              an Idempotency-Key came with another body before; HTTP 422
    │   └── UnsupportedModel       a checkpoint has a feature the converter lacks (`field` names it)
    ├── QuotaExceeded              the client's own limit is used up, try again later; HTTP 429
    ├── Overloaded                 our capacity is used up, try again later; HTTP 503
    ├── BlockFolderError           a block folder is incomplete, altered or points outside itself; refuse to start
    │   └── KnownAnswerMismatch    a block computes other bits here than when it was converted
    ├── Cancelled                  somebody ended the request before it was finished; HTTP 499
    ├── DeadlineExceeded           the request's timeout passed before it was finished; HTTP 504
    ├── WireError                  bytes from a queue, a page or a client are not what they claim to be
    ├── OutOfPages                 a worker's pool has fewer free KV pages than were asked for; never leaves the worker
    ├── ExecutionError             running a stage failed (`block` names where)
    │   ├── RowNotFinite           one request's row is NaN or infinite: that request fails, its batch does not
    │   └── NumericsChanged        no worker of its numerics id is left, and the request asked for `exact`
    └── ServiceUnavailable         a dependency (Redis, worker) is not there; HTTP 503
        └── RedisTrouble           Redis does not do what we ask, and no bug of ours is why: wait, or shed
            ├── RedisUnavailable   it is away, loads, is busy or fails over
            ├── RedisFull          its memory is used up
            └── RedisRefused       it cannot save, or does not let us: somebody has to change something

Each message says what happened, to which block or request, and what the user can do.
Caught by the CLI (one line, exit code), the HTTP error handler (OpenAI's error shape) and the engine loop (RERUN or
FINISH of the request concerned); RedisTrouble by every loop that talks to Redis, which tries again.
"""


class BlockrelayError(Exception):
    """Root of the tree. `str(error)` is one line fit for a user."""


class UsageError(BlockrelayError):
    """The caller asked for something impossible. CLI: exit code 2."""


class BadRequest(UsageError):
    """A request field is wrong. `param` is the field's name as the client spelt it, or None for the body as a whole."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestTooLarge(BadRequest):
    """The body is over the configured limit."""


class RequestTooSlow(BadRequest):
    """The body did not arrive in time."""


class Unauthorized(UsageError):
    """No API key, or an unknown one."""


class ForeignOrigin(UsageError):
    """Sent by a web page of a site that may not use this gateway."""


class UnknownHost(UsageError):
    """Sent to a name that this gateway does not answer to."""


class NotFound(UsageError):
    """Unknown model, request or session."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Conflict(UsageError):
    """A session step that is neither the next one nor a repeat of the last one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class KeyReused(UsageError):
    """The Idempotency-Key is taken: it came with another body before."""


class UnsupportedModel(UsageError):
    """The checkpoint uses something we do not compute. `field` is the config field that says so."""

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class QuotaExceeded(BlockrelayError):
    """The client's own limit is used up. `retry_after_s` is a hint in seconds, `limit` names what it was."""

    def __init__(self, message: str, *, limit: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.limit, self.retry_after_s = limit, retry_after_s


class Overloaded(BlockrelayError):
    """Our capacity is used up. `retry_after_s` is a hint in seconds, `limit` names what it was."""

    def __init__(self, message: str, *, limit: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.limit, self.retry_after_s = limit, retry_after_s


class BlockFolderError(BlockrelayError):
    """A block folder is incomplete, altered, or its manifest points outside the folder."""


class KnownAnswerMismatch(BlockFolderError):
    """A block's output for the fixed input differs from the hash stored at conversion."""

    def __init__(self, message: str, *, block: str) -> None:
        super().__init__(message)
        self.block = block


class Cancelled(BlockrelayError):
    """Somebody ended the request before it was finished."""


class DeadlineExceeded(BlockrelayError):
    """The request's timeout passed before it was finished."""


class WireError(BlockrelayError):
    """Bytes do not decode to what they claim: wrong dtype, shape, length or version."""


class OutOfPages(BlockrelayError):
    """A worker's pool has fewer free KV pages than were asked for."""


class ExecutionError(BlockrelayError):
    """Running a stage failed. `block` names the block (`block_7`), or None when no single block is to blame."""

    def __init__(self, message: str, *, block: str | None = None) -> None:
        super().__init__(message)
        self.block = block


class RowNotFinite(ExecutionError):
    """A request's row became NaN or infinite."""


class NumericsChanged(ExecutionError):
    """No worker of a request's numerics id is left, and it may not go on under another one."""


class ServiceUnavailable(BlockrelayError):
    """A service we depend on does not answer."""


class RedisTrouble(ServiceUnavailable):
    """Redis does not do what we ask, and no bug of ours is why. Only clients of `blockrelay.redis.client` raise it.

    `code` is the first word of Redis' answer (`OOM`, `NOPERM`); empty when there was no answer.
    """

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class RedisUnavailable(RedisTrouble):
    """Redis is away, loads its data, is busy with a script, or fails over."""


class RedisFull(RedisTrouble):
    """Redis' memory is used up: it takes nothing new."""


class RedisRefused(RedisTrouble):
    """Redis cannot save what it is given, or our user may not do this: somebody has to change something."""

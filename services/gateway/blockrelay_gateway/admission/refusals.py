"""Turns ACCEPT's refusals into errors for the client. Pure, but for the jitter of Retry-After.

429 is the client's own limit, 503 the capacity of gateway or cell. Both have Retry-After. A request that ACCEPT
refuses is not queued.
"""

from blockrelay.auth.api_keys import Tenant
from blockrelay.errors import BadRequest, BlockrelayError, Conflict, KeyReused, LimitExceeded, ServiceUnavailable
from blockrelay.protocol.constants import PAGE_TOKENS
from blockrelay.protocol.transitions.calls import Accepted
from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.admission.idempotency import HEADER
from blockrelay_gateway.http.errors import retry_after_s
from blockrelay_gateway.policy import MEMORY_RETRY_MS


def refusal(answer: Accepted, request: AdmissionRequest, tenant: Tenant, *, others: int) -> BlockrelayError | None:
    """The error for an answer of ACCEPT; None for one that is not a refusal.

    `others` is the number of requests behind this one that were to be accepted with it.
    """
    retry_s = retry_after_s(answer.retry_ms)

    def client(limit: str, message: str) -> LimitExceeded:
        return LimitExceeded(message, scope="client", limit=limit, retry_after_s=retry_s)

    def cell(limit: str, message: str) -> LimitExceeded:
        return LimitExceeded(f"{message}; try again later", scope="cell", limit=limit, retry_after_s=retry_s)

    match answer.status:
        case "OK" | "EXISTS" | "REPEAT":
            return None
        case "TOKENS":
            limit = tenant.tokens_per_minute
            return client(
                "tokens_per_minute", f"this key may use {limit} tokens per minute and has {answer.detail} left"
            )
        case "CONCURRENT":
            return client("concurrency", f"this key has {answer.detail} requests under way, which is its limit")
        case "SHARE":
            message = f"this key has {answer.detail} requests under way, its share of what may be; a key that was made"
            return client("in_flight", f"{message} with --concurrency N may have N")
        case "TENANT_RESULTS":
            message = f"the logits of this key already take {_mib(answer)} MiB of the payload Redis, nearly its share"
            return client("result_bytes", f"{message}; try again later")
        case "RESULTS":
            return cell(
                "result_bytes", f"logits take {_mib(answer)} MiB of the payload Redis, nearly all of their share"
            )
        case "BUSY":
            return cell("in_flight", f"{answer.detail} requests are under way, which is the limit")
        case "PAGES" if others and answer.detail == "0":  # all pages are free: waiting would not help
            message = f"{others + 1} choices need more KV pages together than may be promised: send fewer at a time"
            return BadRequest(message, param="prompt")
        case "PAGES":
            return cell("kv_pages", f"the KV cache is oversubscribed ({answer.detail} pages promised)")
        case "WAIT":
            seconds = int(answer.detail) / 1000
            return cell("wait", f"the queue is too long: the first token would take {seconds:.0f} s")
        case "LATE":
            seconds = int(answer.detail) / 1000
            return cell("deadline", f"the request would take {seconds:.1f} s, too close to its timeout or beyond it")
        case "OTHER":
            return KeyReused(f"this {HEADER} came with another body before: a new request needs a new key")
        case "MOVED":
            message = f"the request belongs to another cell by version {answer.detail} of the list of cells"
            return ServiceUnavailable(f"{message}, which this gateway has not read yet; try again")
        case "TOO_LARGE":
            return _too_large(request, int(answer.detail))
        case "NOT_EXACT":
            cause = "exact: true keeps a request off workers whose bits vary (GPUs, and ONNX blocks served as they are)"
            return BadRequest(f"{cause}, and every route of this model has one now: send it without", param="exact")
        case "NO_GRAMMAR":
            lack = "no worker of this model reads grammars as this gateway does: all need llguidance of one version"
            return ServiceUnavailable(f"{lack} (pip install 'blockrelay[structured]')")
        case "STEP":
            return wrong_step(request.body.session, request.body.step, int(answer.detail))


def _too_large(request: AdmissionRequest, pool: int) -> BadRequest:
    """The error for a request that fits into no KV pool; the largest has `pool` pages."""
    pages = pages_of(request)
    cause = f"prompt and max_tokens together need {pages} KV pages of {PAGE_TOKENS} tokens; the largest pool has {pool}"
    if request.body.logits != "none":
        return BadRequest(cause, param="input_ids")
    room = pool * PAGE_TOKENS - int(request.body.prompt.size)
    if room < 1:
        return BadRequest(f"{cause}, too few for the prompt")
    return BadRequest(f"{cause}: send a max_tokens of at most {room}", param="max_tokens")


def pages_of(request: AdmissionRequest) -> int:
    """Number of KV pages of one block that the request may fill."""
    return -(-(int(request.body.prompt.size) + request.params.max_tokens) // PAGE_TOKENS)


def memory_used_up(message: str) -> LimitExceeded:
    """The error of a request that is refused because Redis' memory is short."""
    return LimitExceeded(message, scope="cell", limit="redis_memory", retry_after_s=retry_after_s(MEMORY_RETRY_MS))


def wrong_step(session: str, step: int, expected: int) -> Conflict:
    """The 409 of a session step that is neither the next one nor a repeat of the last one."""
    what = f"session {session!r} expects step {expected}, not {step}"
    if step == expected - 1:
        what += ", which came with another body before"
    return Conflict(what, param="step")


def _mib(answer: Accepted) -> str:
    return f"{int(answer.detail) / (1 << 20):.1f}"

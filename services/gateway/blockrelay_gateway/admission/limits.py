"""What a request may take, and what ACCEPT's refusal means for the client. Pure, but for the jitter.

429: the client's own limit. 503: our capacity. Both come with Retry-After, and neither ever after acceptance.
"""

from collections.abc import Sequence

from blockrelay.auth.api_keys import PRIORITIES, Tenant
from blockrelay.errors import BadRequest, BlockrelayError, Overloaded, QuotaExceeded
from blockrelay.protocol.transitions import Accepted, Limits
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.admission.order import Order
from blockrelay_gateway.http.retry_after import retry_after_s


def priority_of(order: Order, tenant: Tenant) -> int:
    """The priority of its first run. Raises BadRequest for one that the key may not have."""
    if order.priority is None:
        return max(0, tenant.priority)
    if order.priority not in PRIORITIES:
        raise BadRequest(f"priority must be from {PRIORITIES[0]} to {PRIORITIES[-1]}", param="priority")
    if order.priority < tenant.priority:
        raise BadRequest(f"priority must be at least {tenant.priority} with this key", param="priority")
    return order.priority


def limits_for(
    order: Order,
    tenant: Tenant,
    settings: GatewaySettings,
    *,
    company: Sequence[Order] = (),
    results: tuple[int, int] = (0, 0),
) -> Limits:
    """What ACCEPT checks. Raises BadRequest for a request that the limits never allow.

    `company`: requests that are accepted with this one or not at all, so that what they take is checked with it.
    `results`: most bytes of all tensor results, and of the tenant's; 0: no limit.
    Background requests are exempt from the wait limit.
    """
    theirs_bytes = sum(other.result_bytes for other in company)
    most = min((limit for limit in results if limit), default=0)
    if most and order.result_bytes + theirs_bytes > most:
        what = (
            f"the logits take {order.result_bytes + theirs_bytes} bytes; here results may take {most}: "
            'send fewer tokens, or logits "last"'
        )
        raise BadRequest(what, param="logits")
    theirs = sum(map(_tokens, company))
    per_minute, tokens = tenant.tokens_per_minute or 0, _tokens(order) + theirs
    if per_minute and tokens > per_minute:
        what = f"prompt and max_tokens are {tokens} tokens; this key may use {per_minute} in a minute"
        raise BadRequest(what, param="input_tensors" if order.body.logits != "none" else "max_tokens")
    if tenant.concurrency and len(company) >= tenant.concurrency:
        what = f"{len(company) + 1} rows are as many requests; this key may have {tenant.concurrency} under way"
        raise BadRequest(what, param="input_tensors.input_ids")
    return Limits(
        tokens_per_minute=per_minute,
        concurrency=tenant.concurrency or 0,
        wait_s=0.0 if order.body.background else settings.max_wait_s,
        result_bytes=results[0],
        tenant_result_bytes=results[1],
        overcommit=settings.kv_overcommit,
        punctual=True,
        others=len(company),
        others_tokens=theirs,
        others_result_bytes=theirs_bytes,
    )


def _tokens(order: Order) -> int:
    return int(order.body.prompt.size) + order.params.max_tokens


def limit_error(answer: Accepted, tenant: Tenant) -> BlockrelayError | None:
    """The error for an answer that is one of the limits; None for any other."""
    retry = retry_after_s(answer.retry_ms)
    match answer.status:
        case "TOKENS":
            said = f"this key may use {tenant.tokens_per_minute} tokens in a minute and has {answer.detail} left"
            return QuotaExceeded(said, limit="tokens_per_minute", retry_after_s=retry)
        case "CONCURRENT":
            said = f"{answer.detail} requests of this key are under way, its limit"
            return QuotaExceeded(said, limit="concurrency", retry_after_s=retry)
        case "TENANT_RESULTS":
            said = f"logits of this key take {_mib(answer)} MiB of the payload Redis, nearly its part; try again later"
            return QuotaExceeded(said, limit="result_bytes", retry_after_s=retry)
        case "RESULTS":
            said = f"logits take {_mib(answer)} MiB of the payload Redis, nearly all that they may; try again later"
            return Overloaded(said, limit="result_bytes", retry_after_s=retry)
        case "BUSY":
            said = f"{answer.detail} requests are under way, the limit; try again later"
            return Overloaded(said, limit="in_flight", retry_after_s=retry)
        case "PAGES":
            said = f"{answer.detail} KV pages are promised, more than there is hope for; try again later"
            return Overloaded(said, limit="kv_pages", retry_after_s=retry)
        case "WAIT":
            said = f"the first token would take {int(answer.detail) / 1000:.0f} s, too long a queue; try again later"
            return Overloaded(said, limit="wait", retry_after_s=retry)
        case "LATE":
            took = f"{int(answer.detail) / 1000:.1f} s"
            said = f"it would take {took} and needs a reserve beside that, so its timeout may pass; try again later"
            return Overloaded(said, limit="deadline", retry_after_s=retry)
        case _:
            return None


def _mib(answer: Accepted) -> str:
    return f"{int(answer.detail) / (1 << 20):.1f}"

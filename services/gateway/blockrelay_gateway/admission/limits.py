"""What a request may take: the limits that ACCEPT checks. Pure."""

from collections.abc import Sequence

from blockrelay.auth.api_keys import PRIORITIES, USUAL_PRIORITY, Tenant
from blockrelay.errors import BadRequest
from blockrelay.protocol.transitions.calls import Limits
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.admission.admission_request import AdmissionRequest


def priority_of(request: AdmissionRequest, tenant: Tenant) -> int:
    """The priority of its first run. Raises BadRequest for one that the key may not have."""
    if request.priority is None:
        return max(USUAL_PRIORITY, tenant.priority)
    if request.priority not in PRIORITIES:
        raise BadRequest(f"priority must be from {PRIORITIES[0]} to {PRIORITIES[-1]}", param="priority")
    if request.priority < tenant.priority:
        said = f"priority {request.priority} is earlier than this key may ask for: send {tenant.priority} or more"
        raise BadRequest(f"{said}, or use a key that was made with --priority {request.priority}", param="priority")
    return request.priority


def limits_for(
    request: AdmissionRequest,
    tenant: Tenant,
    settings: GatewaySettings,
    *,
    company: Sequence[AdmissionRequest] = (),
    results: tuple[int, int] = (0, 0),
) -> Limits:
    """What ACCEPT checks. Raises BadRequest for a request that the limits never allow.

    `company`: requests that are accepted with this one or not at all, so that what they take is checked with it.
    `results`: most bytes of all tensor results, and of the tenant's; 0: no limit.
    Background requests are exempt from the wait limit.
    """
    theirs_bytes = sum(other.result_bytes for other in company)
    most = min((limit for limit in results if limit), default=0)
    if most and request.result_bytes + theirs_bytes > most:
        what = (
            f"the logits take {request.result_bytes + theirs_bytes} bytes; here results may take {most}: "
            'send fewer tokens, or logits "last"'
        )
        raise BadRequest(what, param="logits")
    theirs = sum(other.tokens for other in company)
    per_minute, tokens = tenant.tokens_per_minute or 0, request.tokens + theirs
    if per_minute and tokens > per_minute:
        what = f"prompt and max_tokens are {tokens} tokens; this key may use {per_minute} per minute"
        raise BadRequest(what, param="input_tensors" if request.body.logits != "none" else "max_tokens")
    if tenant.concurrency and len(company) >= tenant.concurrency:
        what = (
            f"{len(company) + 1} rows count as requests of their own; this key may have {tenant.concurrency} under way"
        )
        raise BadRequest(what, param="input_tensors.input_ids")
    return Limits(
        tokens_per_minute=per_minute,
        concurrency=tenant.concurrency or 0,
        wait_s=0.0 if request.body.background else settings.max_wait_s,
        result_bytes=results[0],
        tenant_result_bytes=results[1],
        overcommit=settings.kv_overcommit,
        enforce_deadline=True,
        others=len(company),
        others_tokens=theirs,
        others_result_bytes=theirs_bytes,
    )

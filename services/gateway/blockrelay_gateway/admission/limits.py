"""Computes the limits that ACCEPT checks for a request. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from blockrelay.auth.api_keys import PRIORITIES, USUAL_PRIORITY, Tenant
from blockrelay.errors import BadRequest
from blockrelay.protocol.transitions.calls import Limits
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.admission.refusals import pages_of


def priority_of(request: AdmissionRequest, tenant: Tenant) -> int:
    """The priority of a request's first run; lower is earlier. A request that names none gets the usual priority, or
    the earliest that the tenant's key may have if that is later.

    Raises BadRequest for a priority outside PRIORITIES, and for one earlier than the key may have.
    """
    if request.priority is None:
        return max(USUAL_PRIORITY, tenant.priority)
    if request.priority not in PRIORITIES:
        raise BadRequest(f"priority must be from {PRIORITIES[0]} to {PRIORITIES[-1]}", param="priority")
    if request.priority < tenant.priority:
        cause = f"priority {request.priority} is earlier than this key may ask for: send {tenant.priority} or more"
        raise BadRequest(f"{cause}, or use a key that was made with --priority {request.priority}", param="priority")
    return request.priority


def limits_for(
    request: AdmissionRequest,
    tenant: Tenant,
    settings: GatewaySettings,
    *,
    others: Sequence[AdmissionRequest] = (),
    each: bool = False,
    results: tuple[int, int] = (0, 0),
) -> Limits:
    """The limits that ACCEPT checks for `request`. Raises BadRequest for a request that they never allow.

    `others` are further requests of the same body, which are accepted with this one or not at all; ACCEPT checks
    their sum. `each`: they are choices, for each of which ACCEPT is called with limits; otherwise rows of one step.
    `results` are the most bytes of all tensor results and of this tenant's; 0: no limit. Background requests are exempt
    from the wait limit.
    """
    theirs_bytes = sum(other.result_bytes for other in others)
    maximum = min((limit for limit in results if limit), default=0)
    if maximum and request.result_bytes + theirs_bytes > maximum:
        what = (
            f"the logits take {request.result_bytes + theirs_bytes} bytes; here results may take {maximum}: "
            'send fewer tokens, or logits "last"'
        )
        raise BadRequest(what, param="logits")
    theirs = sum(other.tokens for other in others)
    per_minute, tokens = tenant.tokens_per_minute or 0, request.tokens + theirs
    sampled = any(other.body.sample for other in others)
    kind, param = ("prompts", "prompt") if each else ("rows", "input_tensors.input_ids")
    if sampled:
        kind, param = "choices", "n"
    if per_minute and tokens > per_minute:
        if each and others:
            with_prompts = "choices, each with its prompt," if sampled else "prompts"
            what = f"{len(others) + 1} {with_prompts} and their max_tokens are {tokens} tokens"
            raise BadRequest(f"{what}; this key may use {per_minute} per minute: send fewer at a time", param=param)
        what = f"prompt and max_tokens are {tokens} tokens; this key may use {per_minute} per minute"
        raise BadRequest(what, param="input_tensors" if request.body.logits != "none" else "max_tokens")
    share = bool(tenant.name) and tenant.concurrency is None
    half = (settings.max_in_flight + 1) // 2 if share else 0
    for maximum, whose in ((tenant.concurrency or half, "this key"), (settings.max_in_flight, "all clients together")):
        if others and maximum and len(others) >= maximum:
            what = f"{len(others) + 1} {kind} count as requests of their own; {whose} may have {maximum} under way"
            raise BadRequest(f"{what}: send at most {maximum} at a time", param=param)
    return Limits(
        tokens_per_minute=per_minute,
        concurrency=tenant.concurrency or 0,
        wait_s=0.0 if request.body.background else settings.max_wait_s,
        result_bytes=results[0],
        tenant_result_bytes=results[1],
        overcommit=settings.kv_overcommit,
        enforce_deadline=True,
        share=share,
        others=len(others),
        others_tokens=theirs,
        others_result_bytes=theirs_bytes,
        each=each,
        others_rows=sum(int(other.body.prompt.size) for other in others) if each else 0,
        others_pages=sum(pages_of(other) for other in others) if each else 0,
    )


def counted_again(limits: Limits) -> Limits:
    """The limits for a choice behind the first one of its HTTP request, from its `limits_for`.

    Its tokens and its place among the requests in flight are checked again, because other clients may have taken them
    since. The forecasts of wait, memory and deadline were made for all choices with the first.
    """
    return replace(limits, wait_s=0.0, overcommit=0.0, enforce_deadline=False)

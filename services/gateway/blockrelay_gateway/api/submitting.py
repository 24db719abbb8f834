"""Has the requests of a client accepted, and waits for room if the client prefers that (`Prefer: wait=SECONDS`)."""

from collections.abc import Sequence
from math import inf

from fastapi import Request

from blockrelay.errors import LimitExceeded
from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.api import state
from blockrelay_gateway.api.client_headers import PREFER, wanted_wait_s
from blockrelay_gateway.cells.cell import Cell
from blockrelay_gateway.cells.waiting_room import Patience
from blockrelay_gateway.http import authentication, sse
from blockrelay_gateway.streaming.readers import Readers


async def submit(request: Request, requests: Sequence[AdmissionRequest]) -> tuple[Cell, Readers] | None:
    """Returns the cell that has accepted `requests`, those of `request`, and a reader, which the caller closes.

    None if the client left while its request was kept. Several requests are never kept. Raises the errors of
    `Submission.submit` and `Submission.keep`, and BadRequest for a wrong header.
    """
    gateway, tenant = state.of(request), authentication.of(request)
    wait_s = wanted_wait_s(request.headers.getlist(PREFER))
    try:
        return await gateway.submission.submit(requests, tenant)
    except LimitExceeded as refusal:
        if not wait_s or len(requests) > 1:
            raise
        timeout_s = requests[0].timeout_s or gateway.settings.request_timeout_s or inf
        patience = Patience(min(wait_s, timeout_s), lambda: authentication.current_tenant(request))
        request.scope["state"]["refusal"] = refusal  # RefusedUnread charges for it if the client leaves
        kept = gateway.submission.keep(requests[0], tenant, refusal, patience)
    accepted = await sse.unless_gone(request, kept)
    if accepted is not None:
        del request.scope["state"]["refusal"]
    return accepted

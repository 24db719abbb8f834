"""Has the requests of a client accepted, and waits for room if the client prefers that (`Prefer: wait=SECONDS`)."""

from collections.abc import Sequence

from fastapi import Request, WebSocket

from blockrelay.errors import LimitExceeded
from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.api import state
from blockrelay_gateway.api.client_headers import PREFER, wanted_wait_s
from blockrelay_gateway.cells.cell import Cell
from blockrelay_gateway.cells.waiting_room import Patience
from blockrelay_gateway.http import authentication, sse
from blockrelay_gateway.streaming.readers import Readers


async def submit(request: Request, requests: Sequence[AdmissionRequest]) -> tuple[Cell, Readers] | None:
    """Returns the cell that has accepted the requests of `request` and a reader, which the caller closes.

    None if the client left while its requests were kept. Raises the errors of `Submission.submit`.
    """
    patience = patience_of(request)
    work = state.of(request).submission.submit(requests, authentication.of(request), patience=patience)
    if not patience.wait_s:
        return await work
    accepted = await sse.unless_gone(request, work)
    if accepted is not None:
        request.scope["state"].pop("refusal", None)
    return accepted


def patience_of(connection: Request | WebSocket) -> Patience:
    """Returns how long a client wants to wait for room. Raises BadRequest for a wrong header."""

    def kept(refusal: LimitExceeded) -> None:
        connection.scope["state"]["refusal"] = refusal  # RefusedUnread charges for it if the client leaves

    wait_s = wanted_wait_s(connection.headers.getlist(PREFER))
    return Patience(wait_s, lambda: authentication.current_tenant(connection), kept)

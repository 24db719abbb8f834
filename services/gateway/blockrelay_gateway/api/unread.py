"""Refuses requests of a flood before their bodies are read."""

import time

from starlette.types import ASGIApp, Receive, Scope, Send

from blockrelay.auth.api_keys import Tenant
from blockrelay.errors import BadRequest, LimitExceeded, RedisTrouble
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.admission.idempotency import HEADER as IDEMPOTENCY_KEY
from blockrelay_gateway.admission.idempotency import keyed_request_id
from blockrelay_gateway.admission.refusal_budget import RefusalBudget
from blockrelay_gateway.cells.cells import Cells
from blockrelay_gateway.http.body_limit import BODY_BYTES, drained, is_small, waits_to_send
from blockrelay_gateway.http.errors import ErrorResponder
from blockrelay_gateway.policy import REFUSED_BODY_BYTES

#: Routes whose new requests may be refused unread. The steps of a session (/v1/infer) are named in their bodies, and a
#: repeated one must be answered.
PATHS = ("/v1/completions", "/v1/chat/completions")


class RefusedUnread:
    """ASGI middleware that repeats a client's last refusal while a RefusalBudget says so, and keeps its accounts.

    A request whose Idempotency-Key is known always passes: its answer exists. `Authentication` must have put the tenant
    into the scope before, and `ConnectionLimit` bounds how many wait for Redis here.
    """

    def __init__(self, app: ASGIApp, cells: Cells, settings: GatewaySettings, responder: ErrorResponder) -> None:
        self._app, self._cells, self._responder = app, cells, responder
        self._secret, self._max_body_bytes = settings.idempotency_secret, settings.max_body_bytes
        self._budget = RefusalBudget()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            await self._app(scope, receive, send)
            return
        tenant: Tenant = scope["state"]["tenant"]
        reason = self._budget.reason(tenant.name, time.monotonic())
        if reason is not None and not await self._exists(scope, tenant):
            if not is_small(scope) and not waits_to_send(scope):
                # A connection that was closed now would be reset before its client has read the answer.
                await drained(receive, self._max_body_bytes)
            await self._responder.refuse_unread(reason, scope, receive, send)
            return
        await self._app(scope, receive, send)
        refusal = scope["state"].get("refusal")
        if isinstance(refusal, LimitExceeded):
            self._budget.charge(tenant.name, refusal, time.monotonic(), cost=_cost(scope))

    async def _exists(self, scope: Scope, tenant: Tenant) -> bool:
        """True if the request may be one that was accepted before; only the route can tell for sure."""
        name = IDEMPOTENCY_KEY.lower().encode()
        keys = [value.decode("latin-1") for header, value in scope["headers"] if header == name]
        if not keys:
            return False
        try:
            request_id = keyed_request_id(keys, tenant=tenant.name, secret=self._secret)
            for cell in self._cells:
                if not cell.reachable or await cell.records.exist([request_id]):
                    return True
        except (BadRequest, RedisTrouble):
            return True
        return False


def _cost(scope: Scope) -> float:
    """The cost of reading a body and refusing it, in refusals of small bodies."""
    return 1 + scope["state"].get(BODY_BYTES, 0) / REFUSED_BODY_BYTES

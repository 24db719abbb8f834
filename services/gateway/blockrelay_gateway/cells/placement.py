"""Which cell a new request goes to. Pure, but for the order that is drawn where nothing else decides.

What decides is the first of these that is there:

1. its session: all steps of one go to the same cell,
2. its Idempotency-Key: a key is one request, whichever gateway it is sent to again,
3. how its prompt begins (PREFIX_TOKENS, with its `cache_salt`): the KV pages of that are in one cell. Where that one
   has more than BOUND times its share of the requests under way, the next in rank gets them too (consistent hashing
   with bounded loads: Mirrokni, Thorup and Zadimoghaddam, 2018),
4. the load of two cells that are drawn: the one with less for its weight (Mitzenmacher's two choices).
"""

import hashlib
import random
from collections.abc import Collection, Mapping
from typing import NamedTuple

from blockrelay.auth.api_keys import Tenant
from blockrelay.protocol.constants import PAGE_TOKENS
from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.admission.namespaces import scoped_salt, scoped_session
from blockrelay_gateway.cells.rendezvous import ranked

#: What of a prompt chooses a cell: four full KV pages. A shorter one is computed again in no time.
PREFIX_TOKENS = 4 * PAGE_TOKENS
BOUND = 1.25


class Offers(NamedTuple):
    """The cells that a request is offered to, in `order`, and the one where it `belongs`: the first of these, unless
    that is away, has no workers, or has more than its share."""

    belongs: str
    order: list[str]


def session_name(tenant: Tenant, session: str) -> str:
    """What chooses the cell of a session, and the name under which it may have moved."""
    return f"session/{scoped_session(tenant.name, session)}"


def prefix_name(request: AdmissionRequest, tenant: Tenant) -> str | None:
    """The same for the beginning of a prompt; None for a short one."""
    prompt = request.body.prompt[:PREFIX_TOKENS]
    if prompt.size < PREFIX_TOKENS:
        return None
    salt = scoped_salt(tenant.name, request.body.salt).encode()
    return hashlib.blake2b(salt + b"\0" + prompt.astype("<i4").tobytes(), digest_size=16).hexdigest()


def offers(
    prefix: str | None,
    weights: Mapping[str, int],
    loads: Mapping[str, int],
    away: Collection[str],
    idle: Collection[str] = (),
    *,
    chance: random.Random | None = None,
) -> Offers:
    """For a request that may go anywhere. `prefix` as `prefix_name` says it, `loads` the requests under way of each
    cell, `away` the cells that do not answer: they come last, for they may be back; before them the `idle`, which
    accept requests and have no workers for them now. `chance` draws."""

    def filled(cell: str) -> float:
        """Requests for each of its weight, with this one."""
        return (loads.get(cell, 0) + 1) / weights[cell]

    def hindered(cell: str) -> int:
        return 2 if cell in away else int(cell in idle)

    order = ranked(prefix or f"{(chance or random).getrandbits(64):x}", weights)
    if prefix is None:
        order[:2] = sorted(order[:2], key=filled)
        return Offers(order[0], sorted(order, key=hindered))
    least = min(map(hindered, order))
    there = [cell for cell in order if hindered(cell) == least]
    mean = (sum(loads.get(cell, 0) for cell in there) + 1) / (sum(weights[cell] for cell in there) or 1)
    full = {cell for cell in there if filled(cell) > max(BOUND * mean, 1 / weights[cell])}
    return Offers(order[0], sorted(order, key=lambda cell: (hindered(cell), cell in full)))

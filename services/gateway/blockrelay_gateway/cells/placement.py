"""Chooses the cell of a new request. Pure, but for cells drawn at random if nothing else decides.

The first of these that a request has decides:

1. its session: all steps of a session go to the same cell,
2. its Idempotency-Key: a key is one request, whichever gateway it is sent to again,
3. the beginning of its prompt (PREFIX_TOKENS, with its `cache_salt`), whose KV pages are in one cell. If that cell has
   more than CELL_LOAD_BOUND times its share of the requests in flight, the next in rank gets them too (consistent
   hashing with bounded loads: Mirrokni, Thorup and Zadimoghaddam, 2018),
4. the load of two cells drawn at random: the one with less load for its weight (Mitzenmacher's two choices).
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
from blockrelay_gateway.policy import CELL_LOAD_BOUND

#: Tokens of a prompt that choose a cell: four full KV pages. A shorter prefix is quickly computed again.
PREFIX_TOKENS = 4 * PAGE_TOKENS


class Offers(NamedTuple):
    """The cells that a request is offered to, in `order`, and the cell to which it `belongs` by its rank.

    The latter is also the first in `order`, unless it is away, has no workers, or has more than its share.
    """

    belongs: str
    order: list[str]


def session_name(tenant: Tenant, session: str) -> str:
    """The name that chooses the cell of a session, and under which MOVE records that it moved."""
    return f"session/{scoped_session(tenant.name, session)}"


def prefix_name(request: AdmissionRequest, tenant: Tenant) -> str | None:
    """The name that chooses the cell of a prompt: a hash of salt and first PREFIX_TOKENS; None for a shorter prompt."""
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
    """Returns the cells for a request without a session or key.

    `prefix` is its `prefix_name`, None without one. `weights` has the cells to choose from, at least one, with their
    shares of new requests (above 0); `loads` has the requests in flight of each cell. Cells that are `away` (they do
    not answer) come last, because they may be back. Before them come the `idle` ones, which accept requests but have no
    workers now. `chance` is the random source; None: Python's own.
    """

    def filled(cell: str) -> float:
        """Requests per weight of the cell, with this one."""
        return (loads.get(cell, 0) + 1) / weights[cell]

    def hindered(cell: str) -> int:
        """2 for a cell that is away, 1 for an idle one, else 0."""
        return 2 if cell in away else int(cell in idle)

    order = ranked(prefix or f"{(chance or random).getrandbits(64):x}", weights)
    if prefix is None:
        order[:2] = sorted(order[:2], key=filled)
        return Offers(order[0], sorted(order, key=hindered))
    least = min(map(hindered, order))
    there = [cell for cell in order if hindered(cell) == least]
    mean = (sum(loads.get(cell, 0) for cell in there) + 1) / (sum(weights[cell] for cell in there) or 1)
    full = {cell for cell in there if filled(cell) > max(CELL_LOAD_BOUND * mean, 1 / weights[cell])}
    return Offers(order[0], sorted(order, key=lambda cell: (hindered(cell), cell in full)))

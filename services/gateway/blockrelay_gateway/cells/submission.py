"""Submits new requests of a gateway with several cells, each to the cell where it belongs.

A keyed request, or a session, is in the cell that the list in force named when it began. So if lists disagree, the
cells of earlier lists are asked first, by MOVE: it finds the request or session there, or it records that the name
goes elsewhere by a newer list; then a gateway that has not read that list yet is refused there. So one key stays one
request (I9 in docs/protocol.md), whenever each gateway reads the file and whatever its clock says. A cell that is away
may have the request: the answer is 503, never a second run.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from blockrelay.auth.api_keys import Tenant
from blockrelay.cell_list import LONGEST_REQUEST_S
from blockrelay.errors import LimitExceeded, ServiceUnavailable
from blockrelay.observability import logs
from blockrelay.protocol.transitions import calls
from blockrelay.protocol.transitions.calls import Binding
from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.cells.cell import Cell
from blockrelay_gateway.cells.cells import Cells
from blockrelay_gateway.cells.placement import offers, prefix_name, session_name
from blockrelay_gateway.cells.rendezvous import ranked
from blockrelay_gateway.cells.waiting_room import Attempt, Patience, WaitingRoom
from blockrelay_gateway.policy import OFFERS
from blockrelay_gateway.streaming.readers import Readers

#: Response header with the name of the cell to which the request belongs, if another cell has accepted it.
INSTEAD_OF = "blockrelay-instead-of"
#: Response header that says that a request was kept until there was room (RFC 7240).
PREFERENCE_APPLIED = "preference-applied"


@dataclass(frozen=True, slots=True)
class CellChoice:
    """The cell of a request or session, and its binding to that cell (None: it may go elsewhere)."""

    cell: Cell
    binding: Binding | None = None


class Submission:
    """Chooses cells for new requests and submits them there."""

    def __init__(self, cells: Cells, room: WaitingRoom, *, retention_s: int, replicas: int) -> None:
        """`retention_s` is that of keyed requests; `replicas` of Redis must have each record of MOVE."""
        self._cells, self._room, self._retention_s, self._replicas = cells, room, retention_s, replicas

    async def submit(
        self,
        requests: Sequence[AdmissionRequest],
        tenant: Tenant,
        *,
        together: bool = False,
        place: CellChoice | None = None,
    ) -> tuple[Cell, Readers]:
        """Has the requests accepted in the cell where they belong; returns it and a reader, which the caller closes.

        Requests without a key or session go to another cell if theirs is away, or has no workers or no room. `place` is
        the cell that they must go to, for a step of a session that of `of_session`; None: this method chooses.
        `together`: they are the rows of one tensor step. There is at least one request.

        Raises LimitExceeded, BadRequest, KeyReused, Conflict if the session is at another step, RedisTrouble, and
        ServiceUnavailable, also if a cell that may have the request is away. Raises WireError if the record of a
        request that exists already cannot be decoded.
        """
        return await self._submit(requests, tenant, together=together, place=place)

    async def keep(
        self, request: AdmissionRequest, tenant: Tenant, refusal: LimitExceeded, patience: Patience
    ) -> tuple[Cell, Readers]:
        """Keeps a request that `submit` has refused with `refusal` until there is room for it.

        Returns what `submit` does, and raises its errors. Raises `refusal`, or a later one, if there is no room within
        the client's patience, and at once if time does not help or too many are kept.
        """

        async def again(now: Tenant, waited_s: float) -> tuple[Cell, Readers]:
            return await self._submit([request], now, waited_s=waited_s)

        keyed = self._cells.several and request.fingerprint
        cell = self._winners(request.request_id)[0].name if keyed else ""
        attempt = Attempt(again, lambda found: found[1].close(), cell)
        found = await self._room.keep(request, tenant, attempt, refusal, patience)
        found[1].notes[PREFERENCE_APPLIED] = "wait"
        return found

    def gateway_ends(self) -> None:
        """Refuses what is kept, because the gateway ends."""
        self._room.gateway_ends()

    async def _submit(
        self,
        requests: Sequence[AdmissionRequest],
        tenant: Tenant,
        *,
        together: bool = False,
        place: CellChoice | None = None,
        waited_s: float | None = None,
    ) -> tuple[Cell, Readers]:
        if place is None and not self._cells.several:
            place = CellChoice(self._cells.home)
        if place is None and requests[0].fingerprint:
            place = await self._place(requests[0].request_id, request_id=requests[0].request_id)
        if place is not None:
            cell, binding = place.cell, place.binding
            return cell, await cell.admission.submit(
                requests, tenant, together=together, binding=binding, waited_s=waited_s
            )
        return await self._anywhere(requests, tenant, together=together, waited_s=waited_s)

    async def of_session(self, tenant: Tenant, session: str, rows: Sequence[str], *, begins: bool) -> CellChoice:
        """The place of a session, or the place where it has to begin if this step `begins` it.

        `session` is the client's id of it. `rows` are the ids that its first row may have in Redis, by its number of
        rows: any one shows that a cell has the session. A session that no cell has gets the cell of the list in force.
        Raises RedisTrouble, and ServiceUnavailable if a cell that may have it is away.
        """
        if not self._cells.several:
            return CellChoice(self._cells.home)
        name = session_name(tenant, session)
        if begins:
            return await self._place(name, sessions=rows)
        # Sessions are kept for as long as they are used: any cell may have one that began under a very old list.
        current, *likely = self._winners(name)
        binding = self._binding(name)
        candidates = dict.fromkeys((current, *likely, *self._cells))
        for cell in filter(lambda one: one.reachable, candidates):
            if await _has_session(cell, rows):
                return CellChoice(cell, binding)
        for cell in candidates:  # a cell that is away may have it
            self._check_there(cell)
        return CellChoice(current, binding)  # its ACCEPT answers that it expects another step

    async def _anywhere(
        self, requests: Sequence[AdmissionRequest], tenant: Tenant, *, together: bool, waited_s: float | None
    ) -> tuple[Cell, Readers]:
        """Submits to the first of up to OFFERS cells that accepts; raises the error of the last one.

        Only ServiceUnavailable, and LimitExceeded for the cell's own limits, lead to the next cell. It raises every
        other error at once.
        """
        away = {cell.name for cell in self._cells if not cell.reachable}
        idle = {cell.name for cell in self._cells if not cell.readiness.serves}
        loads = {cell.name: cell.state.unfinished for cell in self._cells}
        belongs, order = offers(
            prefix_name(requests[0], tenant), self._cells.file.weights(time.time()), loads, away, idle
        )
        *others, last = order[:OFFERS]

        async def submit(cell: Cell) -> tuple[Cell, Readers]:
            readers = await cell.admission.submit(requests, tenant, together=together, waited_s=waited_s)
            if cell.name != belongs:
                readers.notes[INSTEAD_OF] = belongs
            return cell, readers

        for name in others:
            try:
                return await submit(self._cells.named(name))
            except (LimitExceeded, ServiceUnavailable) as error:
                if isinstance(error, LimitExceeded) and error.scope == "client":
                    raise
                if waited_s is None:
                    logs.get().info("CELL_PASSED_OVER", cell=name, request_id=requests[0].request_id, error=str(error))
        return await submit(self._cells.named(last))

    async def _place(self, name: str, *, request_id: str = "", sessions: Sequence[str] = ()) -> CellChoice:
        """The place of a keyed request, or of a session that begins.

        Raises RedisTrouble, and ServiceUnavailable if a cell that may have it is away.
        """
        current, *former = self._winners(name)
        binding, kept_s = self._binding(name), self._retention_s + LONGEST_REQUEST_S
        for cell in former:
            if not cell.reachable and current.reachable and await _has(current, request_id, sessions):
                # It has begun in the current cell and so nowhere else. If it is abandoned right now and begins
                # elsewhere, the record of that move refuses version 0, whatever its own version is.
                return CellChoice(current, replace(binding, version=0))
            self._check_there(cell)
            call = calls.move(binding, retention_s=kept_s, request_id=request_id, sessions=sessions)
            if await cell.links.scripts.run(call, replicas=self._replicas):
                return CellChoice(cell, binding)
        self._check_there(current)
        return CellChoice(current, binding)

    def _winners(self, name: str) -> list[Cell]:
        """The cell for a name by the list in force, then those by earlier ones, the newest first, each once."""
        file, now = self._cells.file, time.time()
        lists = (file.weights(now), *(one.weights for one in file.former(now, self._retention_s)))
        names = dict.fromkeys(ranked(name, weights)[0] for weights in lists)
        return [cell for one in names if (cell := self._cells.get(one)) is not None]

    def _binding(self, name: str) -> Binding:
        return Binding(name, self._cells.version)

    def _check_there(self, cell: Cell) -> None:
        """Raises ServiceUnavailable at once for a cell that is away: waiting would only take the client's time."""
        if not cell.reachable:
            raise ServiceUnavailable(f"cell {cell.name}, to which this request belongs, is away; try again later")


async def _has(cell: Cell, request_id: str, sessions: Sequence[str]) -> bool:
    """True if MOVE would find the request in the cell (not abandoned), or one of the sessions. Raises RedisTrouble."""
    if not request_id:
        return await _has_session(cell, sessions)
    state, abandoned = await cast(
        Any, cell.links.client.hmget(cell.links.keys.request(request_id), "state", "abandoned")
    )
    return state is not None and abandoned is None


async def _has_session(cell: Cell, sessions: Sequence[str]) -> bool:
    return bool(await cast(Any, cell.links.client.exists(*map(cell.links.keys.session, sessions))))

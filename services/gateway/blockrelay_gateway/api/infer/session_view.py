"""GET /v1/sessions/{id}: the step and tokens of a session of tensor steps, and its KV pages on each stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, cast

from blockrelay.auth.api_keys import Tenant
from blockrelay.errors import NotFound
from blockrelay.protocol.constants import PAGE_TOKENS
from blockrelay.protocol.messages import EndEntry
from blockrelay.protocol.plan import WorkerInfo
from blockrelay.protocol.records.ended import decode_log
from blockrelay.redis.registry import read_workers_async
from blockrelay_gateway.admission.namespaces import scoped_session
from blockrelay_gateway.api.infer.session_kv import ServedKv
from blockrelay_gateway.api.infer.tensor_steps import Session, row_session
from blockrelay_gateway.api.state import Gateway
from blockrelay_gateway.cells.cell import Cell
from blockrelay_gateway.streaming.deltas import status_of_record
from blockrelay_gateway.streaming.records import check_number


@dataclass(frozen=True, slots=True)
class SessionRow:
    """One row of a session, with the state of its last step's request."""

    session: Session
    state: str
    """State of the request; "" once Redis has forgotten it."""
    route: tuple[str, ...]
    """The request's worker ids, one for each stage; empty while no run has begun, and once Redis has forgotten it."""


async def view(gateway: Gateway, tenant: Tenant, session_id: str) -> dict[str, Any]:
    """The answer of GET /v1/sessions/{id}.

    Raises NotFound for a session that does not exist. Raises ServiceUnavailable if its cell cannot be reached, and for
    a session of another protocol. Raises WireError if the record of its last request cannot be decoded.
    """
    names = [scoped_session(tenant.name, name) for name in (session_id, row_session(session_id, 0, 2))]
    place = await gateway.submission.of_session(tenant, session_id, names, begins=False)
    rows = await _rows(place.cell, tenant, session_id)
    if not rows:
        raise NotFound(f"session {session_id!r:.140} is unknown or was forgotten after its retention", param="id")
    workers = await read_workers_async(place.cell.links.client, place.cell.links.keys, gateway.served.folder.model_key)
    return {
        "object": "session",
        "session_id": session_id,
        "step": max(row.session.step for row in rows),
        "rows": len(rows),
        "tokens": [len(row.session.tokens) for row in rows],
        "states": [row.state for row in rows],
        "stages": stages(rows, {worker.id: worker for worker in workers}, gateway.kv),
    }


def stages(rows: Sequence[SessionRow], workers: Mapping[str, WorkerInfo], served: ServedKv) -> list[dict[str, Any]]:
    """The KV pages that all tokens of `rows` fill, by stage and worker of the last steps. Pure.

    `workers` has the registered workers by their ids. Each object of the answer is one worker of one stage. `pages`
    counts those of one layer, `kv_bytes` those of all its layers. Both are 0 for a worker that is gone, serves another
    stage now, or has no layer.
    """
    pages: dict[tuple[int, str], int] = {}
    for row in rows:
        for stage, worker_id in enumerate(row.route):
            filled = -(-len(row.session.tokens) // PAGE_TOKENS)
            pages[stage, worker_id] = pages.get((stage, worker_id), 0) + filled
    return [_stage(stage, name, workers.get(name), filled, served) for (stage, name), filled in sorted(pages.items())]


def _stage(stage: int, name: str, worker: WorkerInfo | None, pages: int, served: ServedKv) -> dict[str, Any]:
    there = worker is not None and worker.is_alive and worker.stage == stage
    layers = sum(map(len, served.blocks[worker.first - 1 : worker.last])) if worker and there else 0
    return {
        "stage": stage,
        "worker": name,
        "there": there,
        "blocks": f"{worker.first}-{worker.last}" if worker and there else None,
        "device": (worker.device_id or worker.device) if worker and there else None,
        "layers": layers,
        "pages": pages if layers else 0,
        "kv_bytes": (pages if layers else 0) * layers * 2 * served.shape.half_bytes,
    }


async def _rows(cell: Cell, tenant: Tenant, session_id: str) -> list[SessionRow]:
    """All rows of a session; an empty list if there is no such session."""
    rows: list[SessionRow] = []
    for name in chain([session_id], (row_session(session_id, row, 2) for row in count())):
        fields = await cast(Any, cell.links.client.hgetall(cell.links.keys.session(scoped_session(tenant.name, name))))
        is_whole = name == session_id  # the first name is that of a session with one row
        if fields:
            check_number(fields, f"session {session_id!r}")
            rows.append(await _row(cell, fields))
            if is_whole:
                break
        elif not is_whole:  # no further row
            break
    return rows


async def _row(cell: Cell, fields: Mapping[bytes, bytes]) -> SessionRow:
    session = Session.from_redis(fields)
    record, log = await cell.records.read(fields[b"request"].decode(), whole=False)
    if not record:
        return SessionRow(session, "", ())
    end = next((entry for entry in decode_log(log) if isinstance(entry, EndEntry)), None)
    state = status_of_record(record[b"state"].decode(), end.reason if end else "")
    running = record.get(b"route", b"").decode()
    return SessionRow(session, state, tuple(end.meta.get("route") or () if end else filter(None, running.split(","))))

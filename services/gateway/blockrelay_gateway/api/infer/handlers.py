"""The work behind /v1/infer, the same for HTTP and the WebSocket: one message in, one or more objects out."""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from blockrelay.auth.api_keys import Tenant
from blockrelay.errors import BadRequest, BlockrelayError, ExecutionError, WireError
from blockrelay.protocol.messages import EndEntry
from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.admission.namespaces import scoped_session
from blockrelay_gateway.api.infer import requests
from blockrelay_gateway.api.infer.layout import TensorLayout, answer_bytes, layout_of
from blockrelay_gateway.api.infer.responses import InferFormat, execution, pipeline_error, tensor_success
from blockrelay_gateway.api.infer.session_kv import (
    ServedKv,
    check_kv_lengths,
    fields_of,
    kv_tensors,
    row_kv,
)
from blockrelay_gateway.api.infer.tensor_steps import (
    Session,
    TensorStep,
    other_shapes,
    read_steps,
    row_session,
)
from blockrelay_gateway.api.reading import Tensors
from blockrelay_gateway.api.state import Gateway
from blockrelay_gateway.cells.cell import Cell
from blockrelay_gateway.cells.submission import CellChoice
from blockrelay_gateway.helpers.offload import by_size
from blockrelay_gateway.http.body_budget import BodyBudget, BodyShare
from blockrelay_gateway.policy import ANSWER_ROOM_S, MAX_RESULT_BYTES
from blockrelay_gateway.streaming.deltas import failure
from blockrelay_gateway.streaming.readers import Readers
from blockrelay_gateway.streaming.records import check_number
from blockrelay_gateway.streaming.responses import collect


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer to a request that has ended, and its error if it failed."""

    body: dict[str, Any]
    error: BlockrelayError | None = None
    tensors: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])
    """Tensors by name if `body` is of `tensor_success`: float16 logits [rows, n, vocab], and KV if it was asked for."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a tensor step that has ended."""

    end: EndEntry
    has_logits: bool = False
    """The payload Redis had its logits."""
    kv: list[bytes] | None = None
    """The KV pages that the answer needs; None: the row failed, or the payload Redis has them no more."""

    @property
    def lost(self) -> bool:
        """True if the row ended without an error, but its logits or KV are gone."""
        return failure(self.end) is None and (not self.has_logits or self.kv is None)


@dataclass(frozen=True, slots=True)
class AcceptedStep:
    """A tensor step that was accepted in `cell`: for each row its step, its request and its reader."""

    cell: Cell
    kv: ServedKv
    steps: list[TensorStep]
    rows: list[AdmissionRequest]
    readers: Readers
    layout: TensorLayout
    """The place of each row's logits in the answer's tensor."""
    share: BodyShare
    """Memory of the answer, from the end of the step until the answer is sent or given up."""


async def finish_text(cell: Cell, readers: Readers) -> Finished:
    """Waits until the one request of `readers`, of the text form, has ended and returns its answer or its error.

    Raises ServiceUnavailable if the gateway shuts down first.
    """
    answers, form = await collect(cell, readers), InferFormat()
    ((end,), (active,)) = [answer.end for answer in answers], readers.requests
    assert end is not None
    if error := failure(end):
        return Finished(form.problem(error, active), error)
    return Finished(form.whole(answers, readers.requests))


async def background(cell: Cell, readers: Readers) -> dict[str, Any]:
    """The immediate answer to a background request: its id and status. Raises ServiceUnavailable if Redis is away."""
    return InferFormat().background(readers.requests[0], await cell.status(readers))


async def text_objects(cell: Cell, readers: Readers) -> AsyncIterator[dict[str, Any]]:
    """Streams the answer to the one request of `readers`, of the text form, as JSON objects (WebSocket only).

    The first says that the request is accepted; then one comes for each token, and one for the end, also for a failure.

    Raises ServiceUnavailable if the gateway shuts down first.
    """
    (active,) = readers.requests
    form, relay = InferFormat(), cell.relay(active)
    if opening := form.opening(active):
        yield opening
    async for batch in readers.batches():
        for _, entry in batch:
            delta = relay.push(entry)
            if delta.end is not None and (error := failure(delta.end)):
                yield form.problem(error, active)
            else:
                yield form.chunk(0, delta, active, "")


async def submit_tensors(gateway: Gateway, tensors: Tensors, tenant: Tenant) -> AcceptedStep:
    """Accepts a tensor step, one request for each row; a repeated step gets the requests of the first one.

    The caller closes the readers, also if `finish_tensors` fails.

    Raises BadRequest, Conflict for a step that is neither the next of its session nor a repetition of the last,
    KeyReused for an Idempotency-Key that came with another body, and LimitExceeded. Raises ServiceUnavailable if a
    cell that may have the step is away, if Redis fails (RedisTrouble), or if the session's record is of another
    protocol. Raises WireError if the record of a repeated step cannot be decoded.
    """
    place, steps, rows, layout = await _rows(gateway, tensors, tenant)
    cell, readers = await gateway.submission.submit(rows, tenant, together=True, place=place)
    kept = [requests.accepted(row) for row in rows]
    return AcceptedStep(cell, gateway.kv, steps, kept, readers, layout, BodyShare(gateway.bodies))


async def finish_tensors(accepted: AcceptedStep, session_id: str | None, tenant: Tenant) -> Finished:
    """Waits until all rows of a tensor step have ended and returns the answer.

    Rows whose results are gone are computed once more. If a row failed, or its stored logits cannot be decoded, the
    answer is that error. `session_id` is the client's, which the answer repeats. The caller gives the step's share
    back.

    Raises LimitExceeded if there is no memory for the answer within ANSWER_ROOM_S seconds, and RequestTooLarge if it
    can never fit. Raises ServiceUnavailable if the gateway shuts down or Redis fails, and WireError for KV pages that
    do not fit the model. LimitExceeded, BadRequest and ServiceUnavailable may also come from the cell, when it does not
    accept the rows that are computed once more.
    """
    cell, steps, rows, readers = accepted.cell, accepted.steps, accepted.rows, accepted.readers
    started = min(active.started for active in readers.requests)
    await _wait(readers)
    layout, vocab = accepted.layout, cell.served.folder.model.vocab_size
    await accepted.share.wait(answer_bytes(layout, vocab, accepted.kv, rows), ANSWER_ROOM_S)
    logits = np.zeros((len(rows), layout.width, vocab), np.float16)  # padding stays zero
    places = [logits[row, begin:end] for row, (begin, end) in enumerate(layout.places)]
    try:
        ended = await _ended(cell, readers, rows, places)
        lost = [index for index, row in enumerate(ended) if row.lost]
        if lost:  # their results are gone: compute them once more, outside the session
            renamed = [requests.renamed(rows[index]) for index in lost]
            again = await cell.admission.submit(renamed, tenant, together=True)
            recomputed = await _ended(cell, again, renamed, [places[index] for index in lost])
            for index, row in zip(lost, recomputed, strict=True):
                ended[index] = row
    except WireError as problem:
        error, end = problem, next(one.end for one in readers.requests if one.end is not None)
        return Finished(pipeline_error(error, end, session_id=session_id), error)
    for row in ended:
        error = failure(row.end)
        if error is None and row.lost:
            where = f"payload Redis of cell {cell.name}{cell.results.doubt}"
            error = ExecutionError(f"the result is not on the {where}; try again")
        if error is not None:
            return Finished(pipeline_error(error, row.end, session_id=session_id), error)
    tensors: dict[str, NDArray[Any]] = {"logits": logits}
    if layers := rows[0].body.kv_asked:
        shape, pages = accepted.kv.shape, [row.kv or [] for row in ended]
        size = sum(len(page) for row in pages for page in row)
        tensors |= await by_size(size, kv_tensors, shape, layers, pages, len(steps[0].tokens))
    ends = [row.end for row in ended]
    body = tensor_success(
        tensors,
        ends,
        session_id=session_id,
        step=steps[0].step,
        seconds=time.monotonic() - started,
        **execution(*ends),
    )
    return Finished(body, tensors=tensors)


async def _rows(
    gateway: Gateway, tensors: Tensors, tenant: Tenant
) -> tuple[CellChoice | None, list[TensorStep], list[AdmissionRequest], TensorLayout]:
    """The place of the step's session (None: any cell), for each row its step and its request, and their layout.

    Raises BadRequest for a step that asks for more than an answer may have, Conflict for a wrong step number.
    """
    model, served = gateway.served.folder.model, gateway.kv
    request, number, inputs = tensors.request, tensors.number, tensors.inputs
    given, wanted_layers = tensors.given, tensors.layers
    sessions, place = [Session()] * inputs.rows, None
    if (session := request.session_id) is not None:
        names = [row_session(session, 0, inputs.rows), *other_shapes(session, inputs.rows)]
        names = [scoped_session(tenant.name, name) for name in names]
        place = await gateway.submission.of_session(tenant, session, names, begins=number == 1)
        sessions = await _sessions(place.cell, tenant, session, inputs.rows, number)
    logits = request.logits or "last"
    kv = f"{wanted_layers}{given.digest if given else ''}" if wanted_layers or given else ""
    steps = read_steps(inputs, sessions, session_id=request.session_id, step=number, logits=logits, kv=kv)
    check_kv_lengths([len(step.tokens) for step in steps], served, given=given, wanted_layers=wanted_layers)
    layout, limit = layout_of(steps if logits == "all" else None, rows=len(steps)), gateway.bodies.max_large
    if logits == "all":
        _check_logits(layout, model.vocab_size, gateway.bodies)
    rows = [
        requests.tensor_request(
            gateway.builder,
            request,
            step,
            name,
            logits=logits,
            headers=tensors.headers,
            kv=row_kv(served, row, len(step.tokens), given=given, wanted_layers=wanted_layers),
        )
        for row, (step, name) in enumerate(zip(steps, tensors.who.names(inputs.rows), strict=True))
    ]
    if (size := answer_bytes(layout, model.vocab_size, served, rows)) > limit:
        cause = f"the answer takes {size >> 20} MiB, and at most {limit >> 20} MiB are there for it"
        raise BadRequest(
            f"{cause}: ask for fewer blocks, or tokens, at a time", param="blocks" if wanted_layers else "logits"
        )
    return place, steps, rows, layout


def _check_logits(layout: TensorLayout, vocab: int, bodies: BodyBudget) -> None:
    """Raises BadRequest if the logits of all tokens are more than an answer may have."""
    limit = min(MAX_RESULT_BYTES // 2, bodies.max_large) // (2 * vocab)
    tokens = len(layout.places) * layout.width
    if tokens > limit:
        padded = ", with the padding of shorter rows" if tokens > layout.tokens else ""
        raise BadRequest(f'logits "all" takes at most {limit} new tokens, not {tokens}{padded}', param="logits")


async def _sessions(cell: Cell, tenant: Tenant, session_id: str, rows: int, step: int) -> list[Session]:
    """Reads the sessions of all rows in one transaction.

    Raises BadRequest for a session that has another number of rows, and ServiceUnavailable for one of another
    protocol.
    """

    def key(name: str) -> str:
        return cell.links.keys.session(scoped_session(tenant.name, name))

    together = cell.links.client.pipeline(transaction=True)
    for row in range(rows):
        together.hgetall(key(row_session(session_id, row, rows)))
    together.exists(*map(key, other_shapes(session_id, rows)))
    *records, others = cast(list[Any], await cast(Any, together.execute()))
    for fields in records:
        check_number(fields, f"session {session_id!r}")
    sessions = [Session.from_redis(fields) for fields in records]
    # A first step that was interrupted may have left the sessions of some rows and not of others.
    fewer = step > 1 and any(session.step for session in sessions) and not all(session.step for session in sessions)
    if others or fewer:
        message = f"session {session_id!r} was begun with another number of rows than {rows}"
        raise BadRequest(message, param="input_tensors.input_ids")
    return sessions


async def _wait(readers: Readers) -> None:
    """Waits until every request has ended. Raises ServiceUnavailable if the gateway shuts down first."""
    async for _ in readers.batches():
        pass


async def _ended(
    cell: Cell, readers: Readers, rows: Sequence[AdmissionRequest], places: Sequence[NDArray[np.float16]]
) -> list[Row]:
    """Waits until every request has ended and fetches its results; logits are written into its array of `places`.

    Closes `readers`.
    """

    def give_up() -> bool:
        return cell.registry.closing

    with readers:
        await _wait(readers)
        ended: list[Row] = []
        for active, tensor_row, place in zip(readers.requests, rows, places, strict=True):
            assert active.end is not None
            row = Row(active.end)
            if active.end.reason == "tensor":
                fields = fields_of(tensor_row.body.kv_asked, tensor_row.body.prompt.size)
                kv = await cell.results.fetch_kv(active.id, fields, give_up=give_up)
                there = await cell.results.fetch(active.id, place, now_ms=cell.state.now_ms, give_up=give_up)
                row = Row(active.end, there, kv)
            if tensor_row.body.kv_given:
                await cell.results.take_back(tensor_row.request_id)
            ended.append(row)
        return ended

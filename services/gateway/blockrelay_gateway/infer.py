"""What /v1/infer does, for HTTP and for the WebSocket: one message in, one or more objects out."""

import time
from collections.abc import AsyncIterator
from typing import Any, cast

from blockrelay.api_keys import Tenant
from blockrelay.errors import BadRequest, BlockrelayError, ExecutionError, WireError
from blockrelay.messages import EndEntry
from blockrelay.tensors import decode_result
from blockrelay_gateway.admission import scoped_session
from blockrelay_gateway.answers import collect
from blockrelay_gateway.gateway import Gateway
from blockrelay_gateway.identity import Identity
from blockrelay_gateway.infer_format import InferStream, execution, pipeline_error, tensor_success, text_success
from blockrelay_gateway.offload import by_size
from blockrelay_gateway.readers import Readers
from blockrelay_gateway.relay import failure
from blockrelay_gateway.schemas import TENSOR_FIELDS, TENSOR_ONLY_FIELDS, InferRequest
from blockrelay_gateway.sessions import Session, TensorStep, check_names, read_step
from blockrelay_gateway.translate import Order

#: Float32 bytes of one result: what `logits: all` may ask for.
MAX_RESULT_BYTES = 256 << 20


def is_tensor_form(request: InferRequest) -> bool:
    """Which form it is. Raises BadRequest for a mixture of both, by the name of the field that does not belong."""
    given = request.model_fields_set
    if (request.input_tensors is None) == (request.prompt is None):
        raise BadRequest("send either prompt or input_tensors", param="prompt")
    if request.input_tensors is None:
        for name in sorted(given & TENSOR_ONLY_FIELDS):
            if getattr(request, name) is not None:
                raise BadRequest(f"{name} belongs to the tensor form, which has no prompt", param=name)
        return False
    for name in sorted(given - TENSOR_FIELDS):
        if getattr(request, name) is not None:
            raise BadRequest(f"{name} belongs to the text form, not to input_tensors", param=name)
    return True


async def text_order(gateway: Gateway, request: InferRequest, who: Identity, trace: str) -> Order:
    """The order of the text form. Raises BadRequest."""
    return await by_size(len(request.prompt or ()), gateway.translator.infer_text, request, trace, who)


async def finish_text(gateway: Gateway, readers: Readers) -> tuple[dict[str, Any], BlockrelayError | None]:
    """The answer to the text form once it has ended, and its error if it ended badly."""
    (answer,) = await collect(gateway, readers)
    (flight,) = readers.flights
    assert answer.end is not None
    if error := failure(answer.end):
        return pipeline_error(error, answer.end, session_id=None), error
    seconds = flight.heard - flight.started
    return text_success(answer, flight, seconds=seconds, **execution(answer.end)), None


async def background(gateway: Gateway, readers: Readers) -> dict[str, Any]:
    """The answer to a background request."""
    (flight,) = readers.flights
    return {"status": await gateway.status(readers), "request_id": flight.request, "seed": flight.params.seed}


async def text_objects(gateway: Gateway, readers: Readers) -> AsyncIterator[dict[str, Any]]:
    """The text form as a stream of objects (the WebSocket's way)."""
    (flight,) = readers.flights
    form, relay = InferStream(), gateway.relay(flight)
    if opening := form.opening(flight):
        yield opening
    async for batch in readers.batches():
        for _, entry in batch:
            delta = relay.push(entry)
            if delta.end is not None and (error := failure(delta.end)):
                yield form.problem(error, flight)
            else:
                yield form.chunk(0, delta, flight, "")


async def submit_tensors(
    gateway: Gateway, request: InferRequest, who: Identity, trace: str, tenant: Tenant
) -> tuple[TensorStep, Order, Readers]:
    """Accept a tensor step, or find the one that it repeats. `finish_tensors` closes the readers."""
    step, order = await _order(gateway, request, who, trace, tenant)
    readers = await gateway.admission.submit_step(order, tenant)
    if isinstance(readers, str):  # this step ran before
        flight = await gateway.flights.resume(readers, tenant.name)
        readers = Readers(gateway.flights, [flight], replayed=True)
    return step, order, readers


async def finish_tensors(
    gateway: Gateway, request: InferRequest, tenant: Tenant, step: TensorStep, order: Order, readers: Readers
) -> tuple[dict[str, Any], BlockrelayError | None]:
    """The answer to a tensor step once it has ended, and its error if it failed."""
    started = readers.flights[0].started
    end, raw = await _ended(gateway, readers)
    if raw is None and failure(end) is None:  # its result is gone: compute it once more, outside the session
        again = await gateway.admission.submit([gateway.translator.renamed(order)], tenant)
        end, raw = await _ended(gateway, again)
    error = failure(end)
    if error is None and raw is None:
        error = ExecutionError("the result was not stored; try again")
    if error is not None or raw is None:
        assert error is not None
        return pipeline_error(error, end, session_id=request.session_id), error
    rows = 1 if order.body.logits == "last" else step.new
    try:
        logits = decode_result(raw)
    except WireError as problem:
        return pipeline_error(problem, end, session_id=request.session_id), problem
    if logits.shape[0] < rows or logits.shape[1] != gateway.folder.model.vocab_size:
        problem = ExecutionError(f"the result has shape {list(logits.shape)}, expected {rows} rows")
        return pipeline_error(problem, end, session_id=request.session_id), problem
    answer = tensor_success(
        logits[-rows:],
        end,
        session_id=request.session_id,
        step=step.step,
        seconds=time.monotonic() - started,
        **execution(end),
    )
    return answer, None


async def _order(
    gateway: Gateway, request: InferRequest, who: Identity, trace: str, tenant: Tenant
) -> tuple[TensorStep, Order]:
    model, translator = gateway.folder.model, gateway.translator
    translator.check_model(request.model)
    number = check_names(request.session_id, request.step)
    session = Session()
    if request.session_id is not None:
        key = gateway.keys.session(scoped_session(tenant.name, request.session_id))
        session = Session.from_redis(await cast(Any, gateway.client.hgetall(key)))
    logits = request.logits or "last"
    step = read_step(
        request.input_tensors or {},
        session,
        session_id=request.session_id,
        step=number,
        logits=logits,
        context=model.max_position,
        vocab_size=model.vocab_size,
    )
    if logits == "all" and step.new * model.vocab_size * 4 > MAX_RESULT_BYTES:
        most = MAX_RESULT_BYTES // (model.vocab_size * 4)
        raise BadRequest(f'logits "all" takes at most {most} new tokens, not {step.new}', param="logits")
    order = translator.tensor_order(
        list(step.tokens),
        logits=logits,
        prior=step.prior,
        step=number if step.session else 0,
        session=step.session,
        timeout_s=request.timeout,
        trace=trace,
        salt=request.cache_salt,
        priority=request.priority,
        who=who,
    )
    return step, order


async def _ended(gateway: Gateway, readers: Readers) -> tuple[EndEntry, bytes | None]:
    """The terminal entry of the one request and its stored result. Closes `readers`."""
    with readers:
        (answer,) = await collect(gateway, readers)
        assert answer.end is not None
        if answer.end.reason != "tensor":
            return answer.end, None
        raw = await cast(Any, gateway.payload.get(gateway.keys.result(readers.flights[0].request)))
        return answer.end, raw

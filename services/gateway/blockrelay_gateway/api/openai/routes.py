"""POST /v1/completions and /v1/chat/completions."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from blockrelay_gateway import state as gateways
from blockrelay_gateway.admission.idempotency import HEADER, Identity
from blockrelay_gateway.admission.order import Order
from blockrelay_gateway.api.openai.responses import Kind, Options, format_of
from blockrelay_gateway.api.request_builder import clean_traceparent
from blockrelay_gateway.api.schemas import ChatRequest, CompletionRequest
from blockrelay_gateway.http import authentication
from blockrelay_gateway.http.errors import JsonAnswer, error_body, status_of
from blockrelay_gateway.http.offload import body_size, by_size
from blockrelay_gateway.state import Gateway
from blockrelay_gateway.streaming import sse
from blockrelay_gateway.streaming.deltas import failure
from blockrelay_gateway.streaming.event_ids import starting_after
from blockrelay_gateway.streaming.responses import collect, stream

router = APIRouter()


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one or more prompts."""
    gateway = gateways.of(request)
    trace = clean_traceparent(request.headers.get("traceparent"))
    who = await _identity(gateway, request, body, "completion")
    orders = await by_size(body_size(request), gateway.translator.completion, body, trace, who)
    return await _answer(gateway, request, body, orders, "completion")


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Write the assistant's next message."""
    gateway = gateways.of(request)
    trace = clean_traceparent(request.headers.get("traceparent"))
    who = await _identity(gateway, request, body, "chat")
    order = await by_size(body_size(request), gateway.translator.chat, body, trace, who)
    return await _answer(gateway, request, body, [order], "chat")


async def _identity(gateway: Gateway, request: Request, body: CompletionRequest | ChatRequest, kind: Kind) -> Identity:
    keys = request.headers.getlist(HEADER)
    return await by_size(body_size(request), gateway.identify, keys, body, authentication.of(request), kind)


async def _answer(
    gateway: Gateway, request: Request, body: CompletionRequest | ChatRequest, orders: list[Order], kind: Kind
) -> Response:
    options = Options(
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        return_token_ids=bool(body.return_token_ids),
    )
    form = format_of(kind, gateway.model_name, gateway.tokenizer, options)
    after = starting_after(request, [order.request for order in orders], streamed=bool(body.stream))
    readers = await gateway.admission.submit(orders, authentication.of(request))
    headers = {"x-request-id": orders[0].request, **readers.headers}
    if body.stream:
        return sse.EventStream(stream(gateway, readers, form, after=after), readers, request_id=orders[0].request)
    with readers:
        if body.background:
            return JsonAnswer(
                form.background(readers.flights[0], await gateway.status(readers)), status_code=202, headers=headers
            )
        collected = await sse.unless_gone(request, collect(gateway, readers))
    if collected is None:
        return Response(status_code=499)
    for answer in collected:
        if answer.end is not None and (error := failure(answer.end)):
            return JsonAnswer(error_body(error), status_code=status_of(error), headers=headers)
    return JsonAnswer(form.whole(collected, readers.flights), headers=headers)

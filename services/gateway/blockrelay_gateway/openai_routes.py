"""POST /v1/completions and /v1/chat/completions."""

from collections.abc import AsyncIterator, Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response

from blockrelay.errors import BlockrelayError
from blockrelay_gateway import gateway as gateways
from blockrelay_gateway import sse
from blockrelay_gateway.flights import Flight, Readers
from blockrelay_gateway.gateway import Gateway
from blockrelay_gateway.http_errors import JsonAnswer, error_body
from blockrelay_gateway.openai_format import Format, Kind, Options, format_of
from blockrelay_gateway.relay import Answer, failure
from blockrelay_gateway.schemas import ChatRequest, CompletionRequest
from blockrelay_gateway.translate import Order, clean_traceparent

router = APIRouter()


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one or more prompts."""
    gateway = gateways.of(request)
    trace = clean_traceparent(request.headers.get("traceparent"))
    return await _answer(gateway, request, body, gateway.translator.completion(body, trace), "completion")


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Write the assistant's next message."""
    gateway = gateways.of(request)
    trace = clean_traceparent(request.headers.get("traceparent"))
    return await _answer(gateway, request, body, [gateway.translator.chat(body, trace)], "chat")


async def _answer(
    gateway: Gateway, request: Request, body: CompletionRequest | ChatRequest, orders: list[Order], kind: Kind
) -> Response:
    options = Options(
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        return_token_ids=bool(body.return_token_ids),
    )
    answers = format_of(kind, gateway.model_name, gateway.tokenizer, options)
    readers = await gateway.admission.submit(orders)
    headers = {"x-request-id": orders[0].request}
    if body.stream:
        events = stream(gateway, readers, answers, options)
        return sse.EventStream(events, readers, request_id=orders[0].request)
    with readers:
        if body.background:
            return JsonAnswer(answers.queued(readers.flights[0]), status_code=202, headers=headers)
        collected = await sse.unless_gone(request, collect(gateway, readers))
    if collected is None:
        return Response(status_code=499)
    for answer in collected:
        if answer.end is not None and (error := failure(answer.end)):
            refused = gateway.refusals.answer(request.scope, error)
            refused.headers.update(headers)
            return refused
    return JsonAnswer(answers.whole(collected, readers.flights), headers=headers)


async def collect(gateway: Gateway, readers: Readers) -> list[Answer]:
    """Wait for the end of every request."""
    relays = [gateway.relay(flight) for flight in readers.flights]
    answers = [Answer() for _ in readers.flights]
    async for batch in readers.batches():
        for index, entry in batch:
            answers[index].add(relays[index].push(entry))
    return answers


async def stream(
    gateway: Gateway, readers: Readers, answers: Format, options: Options, *, after: int = 0
) -> AsyncIterator[bytes]:
    """The events of an answer behind position `after`. A bad end is an event of its own, never a silent close.

    With one prompt the event id is the position; with several it is `<index>:<position>`.
    """
    flights = readers.flights
    relays = [gateway.relay(flight) for flight in flights]
    yield sse.RETRY
    if after == 0 and (opening := answers.opening(flights[0])):
        yield sse.event(opening, "0")
    try:
        async for batch in readers.batches(quiet_s=gateway.settings.keep_alive_s):
            if not batch:
                yield sse.KEEP_ALIVE
                continue
            fingerprints = [await gateway.flights.numerics(flight) for flight in flights]
            parts: list[bytes] = []
            for index, entry in batch:
                delta = relays[index].push(entry)
                if delta.position <= after:
                    continue
                name = str(delta.position) if len(flights) == 1 else f"{index}:{delta.position}"
                if delta.end is not None and (error := failure(delta.end)):
                    parts.append(sse.event(error_body(error), name))
                    continue
                parts.append(sse.event(answers.chunk(index, delta, flights[index], fingerprints[index]), name))
            yield b"".join(parts)
        if options.include_usage and _all_good(flights):
            yield sse.event(answers.usage_chunk(flights))
    except BlockrelayError as error:  # the gateway shuts down
        yield sse.event(error_body(error))
    yield sse.DONE


def _all_good(flights: Sequence[Flight]) -> bool:
    return all(flight.end is not None and failure(flight.end) is None for flight in flights)

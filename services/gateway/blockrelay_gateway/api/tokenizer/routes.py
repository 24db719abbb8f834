"""POST /tokenize, POST /detokenize and GET /tokenizer_info, in the forms of vLLM."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from blockrelay_gateway.api import state
from blockrelay_gateway.api.answers.operations import Detokenized, TokenizerInfo, Tokens
from blockrelay_gateway.api.body_route import OwnBodyRoute, described_by
from blockrelay_gateway.api.openai.strictness import header
from blockrelay_gateway.api.reading import BodyReader
from blockrelay_gateway.api.tokenizer.answers import tokenizer_info
from blockrelay_gateway.api.tokenizer.schemas import DetokenizeRequest, TokenizeRequest
from blockrelay_gateway.http import openapi
from blockrelay_gateway.http.errors import JsonAnswer

router = APIRouter(responses=openapi.ERRORS, route_class=OwnBodyRoute)


@router.post("/tokenize", dependencies=[described_by(TokenizeRequest)], responses=openapi.answer(Tokens))
async def tokenize(request: Request) -> Response:
    """The token ids of a text or of a chat: `count`, `max_model_len`, `tokens` and `token_strs`."""
    answer = await state.of(request).intake.body(request, BodyReader.tokenize)
    return Response(answer.json, media_type="application/json", headers=header(answer.ignored))


@router.post("/detokenize", dependencies=[described_by(DetokenizeRequest)], responses=openapi.answer(Detokenized))
async def detokenize(request: Request) -> Response:
    """The text of token ids, in `prompt`, with the names of special tokens."""
    answer = await state.of(request).intake.body(request, BodyReader.detokenize)
    return Response(answer.json, media_type="application/json")


@router.get("/tokenizer_info", responses=openapi.answer(TokenizerInfo))
async def info(request: Request) -> Response:
    """The tokenizer in the names of tokenizer_config.json: special tokens, chat template, `model_max_length`."""
    return JsonAnswer(tokenizer_info(state.of(request).intake.reading.openai))

"""Turns the bytes of a body into requests that can be accepted: all work that grows with the body is here.

Nothing here waits, and no result refers to the body or its parsed JSON. The gateway reads small bodies itself, a helper
process large ones (`intake`), both with this code. Pure, but for the request ids drawn at random.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from pydantic import BaseModel, ValidationError

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.model import ModelConfig
from blockrelay.errors import BadRequest, BlockrelayError, ContextLengthExceeded
from blockrelay.protocol.sampling_params import MAX_STOP_STRINGS, MAX_STOP_TOKENS
from blockrelay.settings import GatewaySettings
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.admission.idempotency import HEADER, Identity, identify
from blockrelay_gateway.api.client_headers import ClientHeaders
from blockrelay_gateway.api.infer import requests as infer_requests
from blockrelay_gateway.api.infer.schemas import InferRequest
from blockrelay_gateway.api.infer.session_kv import (
    GivenKv,
    ServedKv,
    layers_of_blocks,
    read_given,
    served_kv,
    split_tensors,
)
from blockrelay_gateway.api.infer.tensor_steps import Inputs, check_names, read_inputs
from blockrelay_gateway.api.openai.chat_template import ChatTemplate
from blockrelay_gateway.api.openai.requests import OpenAIRequests
from blockrelay_gateway.api.openai.schemas import ChatRequest, CompletionRequest, StreamOptions
from blockrelay_gateway.api.openai.strictness import ignored_fields
from blockrelay_gateway.api.request_builder import RequestBuilder
from blockrelay_gateway.api.structured_output import StructuredOutput
from blockrelay_gateway.api.tokenizer.answers import TokenizerAnswer, detokenized, tokenized
from blockrelay_gateway.api.tokenizer.schemas import DetokenizeRequest, TokenizeRequest
from blockrelay_gateway.http.errors import from_validation, unreadable

#: Limits of the lists in a request, by field: the largest number of items, and what the items are called.
MAX_ITEMS = {"stop": (MAX_STOP_STRINGS, "strings"), "stop_token_ids": (MAX_STOP_TOKENS, "ids")}
Model = TypeVar("Model", bound=BaseModel)
Content = TypeVar("Content", covariant=True)


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """The sender of a body: the `tenant`'s name, the checked headers, and the values of Idempotency-Key (`keys`)."""

    tenant: str
    headers: ClientHeaders
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A body that asks for text: its requests, and the form of its answer."""

    requests: list[AdmissionRequest]
    """One request for each choice."""
    ignored: tuple[str, ...] = ()
    """Names of the fields that change nothing."""
    stream: bool = False
    background: bool = False
    return_token_ids: bool = False
    stream_options: StreamOptions | None = None
    echo: bool = False
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """A tensor step that was checked without its session."""

    request: InferRequest
    """The body without its tensors."""
    number: int
    """Number of the step, from 1."""
    who: Identity
    headers: ClientHeaders
    inputs: Inputs
    given: GivenKv | None
    """KV that the client sent, if any."""
    layers: tuple[int, ...]
    """Layers whose KV the answer has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read(Generic[Content]):
    """A body that was read: either its `content` or the `refusal`."""

    content: Content | None = None
    refusal: BlockrelayError | None = None
    session_id: str | None = None
    """The body's `session_id`, which the answer repeats."""
    name: str | int | None = None
    """The `id` of a WebSocket message, which its answer repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyReader:
    """Reads the bodies of all routes for one model. A wrong body raises nothing: the result has its refusal."""

    openai: OpenAIRequests
    kv: ServedKv
    model_key: str
    """The model's name in Redis."""
    secret: str
    """Key of the hash that makes request ids of idempotency keys."""

    @property
    def builder(self) -> RequestBuilder:
        """The builder of requests for this model."""
        return self.openai.builder

    def completion(self, raw: bytes, sender: RequestOrigin) -> Read[Text]:
        """Reads a body of POST /v1/completions."""
        try:
            body = _validated(CompletionRequest, _parsed(raw))
            ignored = ignored_fields(body, strict=sender.headers.strict)
            requests = self.openai.completion(body, sender.headers, self._identify(body, sender, "completion"))
            return Read(content=_text(body, requests, ignored, body.stream_options))
        except (BlockrelayError, RecursionError) as error:
            return _refused(error)

    def chat(self, raw: bytes, sender: RequestOrigin) -> Read[Text]:
        """Reads a body of POST /v1/chat/completions."""
        try:
            parsed = _parsed(raw)
            self._check_messages(parsed)
            body = _validated(ChatRequest, parsed)
            del parsed
            ignored = ignored_fields(body, strict=sender.headers.strict)
            requests = self.openai.chat(body, sender.headers, self._identify(body, sender, "chat"))
            return Read(content=_text(body, requests, ignored, body.stream_options))
        except (BlockrelayError, RecursionError) as error:
            return _refused(error)

    def tokenize(self, raw: bytes, sender: RequestOrigin) -> Read[TokenizerAnswer]:
        """Reads a body of POST /tokenize, and answers it."""
        try:
            parsed = _parsed(raw)
            self._check_messages(parsed)
            body = _validated(TokenizeRequest, parsed)
            del parsed
            return Read(content=tokenized(self.openai, body, strict=sender.headers.strict))
        except (BlockrelayError, RecursionError) as error:
            return _refused(error)

    def detokenize(self, raw: bytes, sender: RequestOrigin) -> Read[TokenizerAnswer]:
        """Reads a body of POST /detokenize, and answers it."""
        try:
            return Read(content=detokenized(self.openai, _validated(DetokenizeRequest, _parsed(raw))))
        except (BlockrelayError, RecursionError) as error:
            return _refused(error)

    def infer(self, raw: bytes, sender: RequestOrigin) -> Read[Text | Tensors]:
        """Reads a body of POST /v1/infer, of the text form or the tensor form."""
        session: str | None = None
        try:
            parsed = _parsed(raw)
            session = _session(parsed)
            body = _validated(InferRequest, parsed)
            del parsed
            if body.id is not None:
                raise BadRequest("id is for messages on the WebSocket", param="id")
            if body.idempotency_key is not None:
                message = f"idempotency_key is for messages on the WebSocket: send the header {HEADER}"
                raise BadRequest(message, param=HEADER)
            return Read(content=self._infer(body, sender), session_id=session)
        except (BlockrelayError, RecursionError) as error:
            return _refused(error, session=session)

    def message(self, raw: bytes, sender: RequestOrigin) -> Read[Text | Tensors]:
        """Reads a message of /v1/infer's WebSocket. `sender` has no keys: each message has its own."""
        session, name = None, None
        try:
            parsed = _parsed(raw, "message")
            session, name = _plain(parsed, "session_id"), _plain(parsed, "id")
            body = _validated(InferRequest, parsed)
            del parsed
            keys = () if body.idempotency_key is None else (body.idempotency_key,)
            content = self._infer(body, RequestOrigin(sender.tenant, sender.headers, keys))
            return Read(content=content, session_id=session, name=name)
        except (BlockrelayError, RecursionError) as error:
            return _refused(error, session=session, name=name)

    def _check_messages(self, parsed: object) -> None:
        """Raises ContextLengthExceeded for more messages than the context has tokens: validating them takes long."""
        if (count := _count(parsed, "messages")) > (context := self.builder.model.max_position):
            message = f"messages has {count} of them, and the model's context is {context} tokens"
            raise ContextLengthExceeded(message, param="messages")

    def _infer(self, body: InferRequest, sender: RequestOrigin) -> Text | Tensors:
        who = self._identify(body, sender, "infer")
        if not infer_requests.is_tensor_form(body):
            request = infer_requests.text_request(self.builder, body, sender.headers, who)
            return _text(body, [request])
        model = self.builder.model
        self.builder.check_model(body.model)
        number = check_names(body.session_id, body.step)
        layers = layers_of_blocks(self.kv, body.blocks)
        tensors, past = split_tensors(body.input_tensors or {})
        inputs = read_inputs(tensors, context=model.max_position, vocab_size=model.vocab_size)
        given = read_given(self.kv, past, rows=inputs.rows, context=model.max_position)
        return Tensors(
            request=body.model_copy(update={"input_tensors": None}),
            number=number,
            who=who,
            headers=sender.headers,
            inputs=inputs,
            given=given,
            layers=layers,
        )

    def _identify(self, body: BaseModel, sender: RequestOrigin, route: str) -> Identity:
        return identify(sender.keys, body, tenant=sender.tenant, route=route, model=self.model_key, secret=self.secret)


def reading_of(settings: GatewaySettings, folder: BlockFolder) -> BodyReader:
    """Builds the reader of bodies for the model in `folder`.

    Raises BlockFolderError for a tokenizer or chat template that cannot be used.
    """
    model: ModelConfig = folder.model
    source = folder.chat_template()
    tokenizer = Tokenizer.from_file(folder.tokenizer_path) if folder.tokenizer_path else None
    builder = RequestBuilder(
        name=settings.served_name(model.name),
        model=model,
        generation=folder.manifest.generation,
        tokenizer=tokenizer,
        structured=StructuredOutput.of(tokenizer, model),
        default_max_tokens=settings.default_max_tokens,
        max_tokens_limit=settings.max_tokens_limit,
    )
    template = ChatTemplate(source, special_tokens=model.template_tokens) if source else None
    return BodyReader(
        openai=OpenAIRequests(builder, template),
        kv=served_kv(folder),
        model_key=folder.model_key,
        secret=settings.idempotency_secret,
    )


def _parsed(raw: bytes, what: str = "body") -> object:
    """Parses the JSON of a body or message. Raises BadRequest with the cause if it is not JSON."""
    if not raw:
        raise BadRequest(f"the {what} is empty: send a JSON object")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise unreadable(error, what) from None


def _validated(model: type[Model], parsed: object) -> Model:
    """Validates parsed JSON as `model`. Raises BadRequest naming the first field that is wrong."""
    if parsed is None:
        raise BadRequest("the body is empty: send a JSON object")
    _check_counts(parsed)
    try:
        return model.model_validate(parsed)
    except ValidationError as error:
        raise from_validation(error.errors(include_input=False, include_url=False)) from None


def _check_counts(parsed: object) -> None:
    """Raises BadRequest for a list over its limit in MAX_ITEMS: validating each item may take seconds."""
    for field, (limit, what) in MAX_ITEMS.items():
        if (count := _count(parsed, field)) > limit:
            raise BadRequest(f"{field} takes at most {limit} {what}, not {count}", param=field)


def _count(parsed: object, field: str) -> int:
    """Number of items of the list in a field; 0 if the field is missing or no list."""
    value = cast(dict[str, object], parsed).get(field) if isinstance(parsed, dict) else None
    return len(cast(list[object], value)) if isinstance(value, list) else 0


def _text(
    body: CompletionRequest | ChatRequest | InferRequest,
    requests: list[AdmissionRequest],
    ignored: Sequence[str] = (),
    options: StreamOptions | None = None,
) -> Text:
    return Text(
        requests=requests,
        ignored=tuple(ignored),
        stream=bool(body.stream),
        background=bool(body.background),
        return_token_ids=bool(body.return_token_ids),
        stream_options=options,
        echo=bool(getattr(body, "echo", None)),
        prompt_logprobs=getattr(body, "prompt_logprobs", None),
    )


def _refused(
    error: BlockrelayError | RecursionError, *, session: str | None = None, name: str | int | None = None
) -> Read[Any]:
    """A refused body; the error keeps no frames, because they refer to the body and its parsed JSON.

    A RecursionError means that it was nested just so that it could be parsed, and no more.
    """
    if isinstance(error, RecursionError):
        error = unreadable(error)
    error.__cause__ = error.__context__ = None
    return Read(refusal=error.with_traceback(None), session_id=session, name=name)


def _session(parsed: object) -> str | None:
    value = cast(dict[str, object], parsed).get("session_id") if isinstance(parsed, dict) else None
    return value if isinstance(value, str) else None


def _plain(parsed: object, field: str) -> Any:
    value = cast(dict[str, object], parsed).get(field) if isinstance(parsed, dict) else None
    return value if isinstance(value, str | int) else None

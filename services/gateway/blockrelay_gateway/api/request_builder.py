"""HTTP requests to orders: what ACCEPT writes. Pure, except that an order whose name was not given draws a random one.

Everything that can be wrong with a request's content is found here, before anything is queued.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, cast

import numpy as np

from blockrelay.block_folder.manifest import GenerationDefaults, ModelConfig
from blockrelay.errors import BadRequest, NotFound
from blockrelay.protocol.messages import MAX_CHOICES, RequestBody
from blockrelay.protocol.sampling_params import SamplingParams, check_prompt, derive_seed
from blockrelay.protocol.tensors import result_bytes
from blockrelay.protocol.transitions import SessionStep
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.admission.idempotency import Identity, Name, random_identity
from blockrelay_gateway.admission.order import Order
from blockrelay_gateway.api.openai.chat_template import ChatTemplate
from blockrelay_gateway.api.schemas import ChatMessage, ChatRequest, CompletionRequest, InferRequest, SamplingFields

MAX_SALT = 256
MAX_TIMEOUT_S = 7 * 24 * 3600.0
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def clean_traceparent(header: str | None) -> str:
    """A W3C traceparent header, or "" when it is absent or malformed (the specification says: ignore it)."""
    return header if header and _TRACEPARENT.fullmatch(header) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translator:
    """Knows the model. Methods raise BadRequest (NotFound for another model) with the field's name."""

    name: str
    model: ModelConfig
    generation: GenerationDefaults
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    default_max_tokens: int

    def completion(self, request: CompletionRequest, trace: str = "", who: Identity | None = None) -> list[Order]:
        """One order per prompt."""
        self.check_model(request.model)
        request.check_neutral()
        _check_stream_options(request)
        prompts = self._prompts(request.prompt)
        if request.background and len(prompts) > 1:
            raise BadRequest("background takes one prompt per request", param="background")
        names = (who or random_identity()).names(len(prompts))
        return [
            self._order(request, name, prompt, request.max_tokens, request.logprobs, trace)
            for name, prompt in zip(names, prompts, strict=True)
        ]

    def chat(self, request: ChatRequest, trace: str = "", who: Identity | None = None) -> Order:
        """The order of the next message."""
        self.check_model(request.model)
        request.check_neutral()
        _check_stream_options(request)
        if request.top_logprobs is not None and not request.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        if len({request.max_tokens, request.max_completion_tokens} - {None}) > 1:
            raise BadRequest("max_tokens and max_completion_tokens contradict each other", param="max_tokens")
        spelt = {"logprobs": "top_logprobs"}
        if request.max_completion_tokens is not None:
            spelt["max_tokens"] = "max_completion_tokens"
        most = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
        if self.template is None or self.tokenizer is None:
            raise BadRequest("the model has no chat template: use /v1/completions", param="messages")
        if not request.messages:
            raise BadRequest("messages is empty", param="messages")
        messages = [_message(message, index) for index, message in enumerate(request.messages)]
        who = who or random_identity()
        text = self.template.render(messages, keyed=bool(who.fingerprint))
        tokens = self._encode(text, "messages", add_special_tokens=False)
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        (name,) = who.names()
        return self._order(request, name, tokens, most, logprobs, trace, param="messages", spelt=spelt)

    def infer_text(self, request: InferRequest, trace: str = "", who: Identity | None = None) -> Order:
        """The text form of /v1/infer."""
        self.check_model(request.model)
        prompt = request.prompt
        tokens = self._encode(prompt, "prompt") if isinstance(prompt, str) else list(prompt or ())
        (name,) = (who or random_identity()).names()
        return self._order(request, name, tokens, request.max_tokens, None, trace)

    def check_model(self, name: str | None) -> None:
        """Raise NotFound unless `name` is ours; None means ours."""
        if name is not None and name != self.name:
            raise NotFound(f"model {name!r} does not exist here; this gateway serves {self.name!r}", param="model")

    def _prompts(self, prompt: object) -> list[list[int]]:
        if isinstance(prompt, str):
            return [self._encode(prompt, "prompt")]
        items = cast(list[object], prompt) if isinstance(prompt, list) else []
        if items and all(type(item) is int for item in items):
            return [cast(list[int], items)]
        if isinstance(prompt, list) and not items:
            raise BadRequest("prompt is empty: at least one token is needed", param="prompt")
        if not items or not (
            all(isinstance(item, str) for item in items) or all(isinstance(item, list) for item in items)
        ):
            raise BadRequest(
                "prompt must be text, token ids, a list of texts or a list of lists of token ids", param="prompt"
            )
        if len(items) > MAX_CHOICES:
            raise BadRequest(f"prompt takes at most {MAX_CHOICES} prompts, not {len(items)}", param="prompt")
        prompts: list[list[int]] = []
        for index, item in enumerate(items):
            if isinstance(item, str):
                prompts.append(self._encode(item, "prompt"))
                continue
            tokens = cast(list[object], item)
            if not all(type(token) is int for token in tokens):
                raise BadRequest(f"prompt: item {index} is not a list of token ids", param="prompt")
            prompts.append(cast(list[int], tokens))
        return prompts

    def _encode(self, text: str, param: str, *, add_special_tokens: bool = True) -> list[int]:
        if self.tokenizer is None:
            raise BadRequest(f"the model has no tokenizer: send {param} as token ids", param=param)
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except BadRequest as error:
            raise BadRequest(f"{param}: {error}", param=param) from error

    def _order(
        self,
        request: SamplingFields,
        name: Name,
        prompt: list[int],
        max_tokens: int | None,
        logprobs: int | None,
        trace: str,
        *,
        param: str = "prompt",
        spelt: Mapping[str, str] = MappingProxyType({}),
    ) -> Order:
        """`param` and `spelt` (our name -> theirs) say how the client spells the fields that may be wrong."""
        room = max(1, self.model.max_position - len(prompt))
        default = self.generation.max_tokens or self.default_max_tokens
        try:
            if max_tokens is not None and max_tokens < 1:
                raise BadRequest(f"max_tokens must be at least 1, not {max_tokens}", param="max_tokens")
            context = self.model.max_position
            if max_tokens is not None and max_tokens > context:
                message = f"max_tokens must be at most {context}, the model's context, not {max_tokens}"
                raise BadRequest(message, param="max_tokens")
            params = SamplingParams(
                max_tokens=min(default, room) if max_tokens is None else max_tokens,
                temperature=_first(request.temperature, self.generation.temperature, 1.0),
                top_k=0 if request.top_k == -1 else _first(request.top_k, self.generation.top_k, 0),
                top_p=_first(request.top_p, self.generation.top_p, 1.0),
                min_p=_first(request.min_p, self.generation.min_p, 0.0),
                seed=derive_seed(name.request) if request.seed is None else request.seed,
                stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
                stop_token_ids=tuple(request.stop_token_ids or ()),
                ignore_eos=bool(request.ignore_eos),
                logprobs=logprobs,
            )
            if params.stop and self.tokenizer is None:
                raise BadRequest("the model has no tokenizer, so it cannot look for stop strings", param="stop")
            check_prompt(prompt, params, vocab_size=self.model.vocab_size, context=context, param=param)
        except BadRequest as error:
            ours = error.param or ""
            if ours not in spelt:
                raise
            raise BadRequest(str(error).replace(ours, spelt[ours]), param=spelt[ours]) from error
        body = RequestBody(
            prompt=np.array(prompt, dtype=np.int32),
            params=params.to_dict(),
            traceparent=trace,
            background=bool(request.background),
            salt=checked_salt(request.cache_salt),
            group=name.group,
            choices=name.choices,
            exact=bool(request.exact),
        )
        return Order(
            request=name.request,
            fingerprint=name.fingerprint,
            body=body,
            params=params,
            timeout_s=checked_timeout(request.timeout),
            priority=request.priority,
        )

    def tensor_order(
        self,
        tokens: list[int],
        *,
        name: Name,
        logits: Literal["last", "all"],
        prior: int,
        step: int,
        session: SessionStep | None,
        timeout_s: float | None,
        trace: str,
        salt: str | None = None,
        priority: int | None = None,
        exact: bool = False,
    ) -> Order:
        """A row of a tensor step: `tokens` are all of its session's, the first `prior` of them from earlier steps."""
        params = SamplingParams(max_tokens=0, temperature=0.0, seed=derive_seed(name.request))
        check_prompt(
            tokens,
            params,
            vocab_size=self.model.vocab_size,
            context=self.model.max_position,
            param="input_tensors.input_ids",
        )
        body = RequestBody(
            prompt=np.array(tokens, dtype=np.int32),
            params=params.to_dict(),
            logits=logits,
            prior=prior,
            traceparent=trace,
            session=session.session if session else "",
            step=step,
            salt=checked_salt(salt),
            group=name.group,
            choices=name.choices,
            exact=exact,
        )
        return Order(
            request=name.request,
            fingerprint=name.fingerprint,
            body=body,
            params=params,
            timeout_s=checked_timeout(timeout_s),
            priority=priority,
            session=session,
            result_bytes=result_bytes(len(tokens) - prior if logits == "all" else 1, self.model.vocab_size),
        )

    def renamed(self, order: Order) -> Order:
        """The same work under a new id and outside its session."""
        return replace(order, request=random_identity().base, fingerprint="", session=None)


def checked_timeout(seconds: float | None) -> float | None:
    """Raise BadRequest unless the client's `timeout` makes sense."""
    if seconds is not None and not 0 < seconds <= MAX_TIMEOUT_S:  # also false for NaN
        raise BadRequest(f"timeout must be above 0 and at most {MAX_TIMEOUT_S:g} seconds", param="timeout")
    return seconds


def checked_salt(salt: str | None) -> str:
    """The salt of page names; "" without one. Raise BadRequest for one that is empty, too long or no text."""
    if salt is None:
        return ""
    if not 1 <= len(salt) <= MAX_SALT:
        raise BadRequest(f"cache_salt has 1 to {MAX_SALT} characters, not {len(salt)}", param="cache_salt")
    if "\0" in salt:  # what stands before one is the tenant
        raise BadRequest("cache_salt has a NUL character", param="cache_salt")
    if any("\ud800" <= character <= "\udfff" for character in salt):
        raise BadRequest("cache_salt has half a surrogate pair", param="cache_salt")
    return salt


def _check_stream_options(request: CompletionRequest | ChatRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options needs stream: true", param="stream_options")


def _first(*values: Any) -> Any:
    """The first that is not None."""
    return next(value for value in values if value is not None)


def _message(message: ChatMessage, index: int) -> dict[str, str]:
    """What a template sees of a message: parts of text are joined."""
    param = f"messages.{index}"
    for name in ("refusal", "audio", "tool_calls", "function_call", "annotations"):
        if getattr(message, name) not in (None, []):
            raise BadRequest(f"{param}.{name} is not supported", param=f"{param}.{name}")
    plain = {"role": message.role, "content": _content(message.content, f"{param}.content")}
    return plain if message.name is None else {**plain, "name": message.name}


def _content(content: object, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{param} must be text or a list of parts", param=param)
    texts: list[str] = []
    for part in cast(list[object], content):
        fields = cast(dict[str, object], part) if isinstance(part, dict) else {}
        text = fields.get("text")
        if fields.get("type") != "text" or not isinstance(text, str) or len(fields) != 2:
            raise BadRequest(f'{param}: only parts {{"type": "text", "text": ...}} are supported', param=param)
        texts.append(text)
    return "".join(texts)

"""Builds admission requests from the fields that all APIs share, and checks them. Pure.

The APIs differ in the spelling of a few fields (`FieldNames`), which errors name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from blockrelay.block_folder.manifest import GenerationDefaults
from blockrelay.block_folder.model import ModelConfig
from blockrelay.errors import BadRequest, ContextLengthExceeded, NotFound
from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.sampling_params import (
    MAX_BAD_WORDS,
    SamplingParams,
    check_logprobs,
    check_prompt,
    derive_seed,
)
from blockrelay.text.tokenizer import LONG_TEXT, Tokenizer
from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.admission.idempotency import Name
from blockrelay_gateway.api.client_headers import ClientHeaders
from blockrelay_gateway.api.common_schemas import SamplingFields
from blockrelay_gateway.api.structured_output import StructuredOutput
from blockrelay_gateway.policy import EXPECTED_TOKENS, MAX_TIMEOUT_S

#: The most characters of `cache_salt`.
MAX_SALT = 256
#: More digits than any token id has.
_ID_DIGITS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldNames:
    """The names that an API has for the fields that errors name."""

    prompt: str = "prompt"
    max_tokens: str = "max_tokens"
    logprobs: str = "logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBuilder:
    """Builds requests for one model. Its methods raise BadRequest, or NotFound for another model, with the field."""

    name: str
    """The model's name in the API."""
    model: ModelConfig
    generation: GenerationDefaults
    """The model's own defaults for sampling."""
    tokenizer: Tokenizer | None
    """The model's tokenizer; None: prompts must be token ids, and stop strings are refused."""
    default_max_tokens: int | None
    """New tokens if neither request nor model names a limit; None: EXPECTED_TOKENS, for chats what admission allows."""
    structured: StructuredOutput
    """Makes the grammars of requests that ask for structured output."""
    max_tokens_limit: int | None = None
    """The most new tokens of any request; None: as many as the context has room for."""

    def check_model(self, name: str | None) -> None:
        """Raises NotFound unless `name` is the served model; None stands for it."""
        if name is not None and name != self.name:
            raise NotFound(f"model {name!r} does not exist here; this gateway serves {self.name!r}", param="model")

    def encode(self, text: str, param: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encodes the text of the field `param`.

        `add_special_tokens` is False for texts of chat templates, which have special tokens already.
        Raises BadRequest without a tokenizer and for a text that is not Unicode, and ContextLengthExceeded for a text
        that is certainly too long.
        """
        if self.tokenizer is None:
            raise BadRequest(f"the model has no tokenizer: send {param} as token ids", param=param)
        self._check_length(text, self.tokenizer, param)
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except BadRequest as error:
            raise BadRequest(f"{param}: {error}", param=param) from error

    def _check_length(self, text: str, tokenizer: Tokenizer, param: str) -> None:
        """Raises ContextLengthExceeded for a text that is certainly too long, before it costs time and memory.

        It compares the bytes, then the tokens of ever longer beginnings: what follows a beginning can change its last
        tokens only.
        """
        context = self.model.max_position
        message = f"This model's maximum context length is {context} tokens, and {param} has"
        size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        if size > context * tokenizer.longest:
            raise ContextLengthExceeded(
                f"{message} {size} bytes, more than that many tokens can stand for", param=param
            )
        beginning = max(LONG_TEXT, 4 * context)
        while beginning < len(text):
            prefix = text[:beginning].encode("utf-8", "replace").decode()
            if len(tokenizer.encode(prefix, add_special_tokens=False)) > 2 * context:
                raise ContextLengthExceeded(f"{message} more than {2 * context}", param=param)
            beginning *= 2

    def text(
        self,
        fields: SamplingFields,
        name: Name,
        prompt: list[int],
        *,
        max_tokens: int | None,
        logprobs: int | None,
        headers: ClientHeaders,
        prompt_logprobs: int | None = None,
        fewest_tokens: int = 1,
        open_ended: bool = False,
        calls: tuple[str, str] | None = None,
        names: FieldNames = FieldNames(),  # frozen
    ) -> AdmissionRequest:
        """Builds a request for text from `fields`, which all APIs spell the same, and the encoded `prompt`.

        `name` has the request's id. `logprobs` is the number of alternatives for each token; None: none are computed.
        `prompt_logprobs` is the same for the tokens of the prompt. `calls` has the grammar and its id if the answer may
        call tools.
        `max_tokens` is a ceiling, of `fewest_tokens` at least: the limit in force is also bounded by `max_tokens_limit`
        and by the context's room behind the prompt. An `open_ended` request may use the rest of the context if client,
        model and settings name no limit.
        """
        context = self.model.max_position
        if max_tokens is not None and max_tokens < fewest_tokens:
            least = f"must be at least {fewest_tokens}, not {max_tokens}"
            raise BadRequest(f"{names.max_tokens} {least}", param=names.max_tokens)
        if logprobs is not None:
            check_logprobs(logprobs, param=names.logprobs)
        stop = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
        named = self.generation.max_tokens or self.default_max_tokens if max_tokens is None else max_tokens
        limit = (context if open_ended else EXPECTED_TOKENS) if named is None else named
        grammar, grammar_id = self.structured.grammar_of(fields, calls)
        params = SamplingParams(
            max_tokens=min(limit, self.max_tokens_limit or limit, max(1, context - len(prompt))),
            temperature=_first(fields.temperature, self.generation.temperature, 1.0),
            top_k=0 if fields.top_k == -1 else _first(fields.top_k, self.generation.top_k, 0),
            top_p=_first(fields.top_p, self.generation.top_p, 1.0),
            min_p=_first(fields.min_p, self.generation.min_p, 0.0),
            seed=derive_seed(name.request_id) if fields.seed is None else fields.seed,
            stop=stop,
            stop_token_ids=self._stop_ids(stop, fields.stop_token_ids or ()),
            ignore_eos=bool(fields.ignore_eos),
            use_cache=fields.use_cache is not False,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logit_bias=_bias(fields.logit_bias or {}),
            presence_penalty=_first(fields.presence_penalty, 0.0),
            frequency_penalty=_first(fields.frequency_penalty, 0.0),
            repetition_penalty=_first(fields.repetition_penalty, self.generation.repetition_penalty, 1.0),
            min_tokens=fields.min_tokens or 0,
            bad_words=self._bad_words(fields.bad_words or ()),
            grammar=grammar,
        )
        if params.stop and self.tokenizer is None:
            raise BadRequest("the model has no tokenizer, so it cannot look for stop strings", param="stop")
        asked = self.request(fields, name, prompt, params, headers, param=names.prompt, grammar_id=grammar_id)
        return replace(asked, open_ended=open_ended and named is None)

    def request(
        self,
        fields: SamplingFields,
        name: Name,
        prompt: list[int],
        params: SamplingParams,
        headers: ClientHeaders,
        *,
        param: str,
        grammar_id: str = "",
    ) -> AdmissionRequest:
        """Builds what requests for text and for tensors have in common; the field `param` has the `prompt`."""
        model = self.model
        check_prompt(prompt, params, vocab_size=model.vocab_size, context=model.max_position, param=param)
        body = RequestBody(
            prompt=np.array(prompt, dtype=np.int32),
            params=params.to_dict(),
            traceparent=headers.traceparent,
            background=bool(fields.background),
            salt=_checked_salt(fields.cache_salt),
            group=name.group,
            choices=name.choices,
            grammar_id=grammar_id,
            exact=headers.is_exact(fields),
            traced=headers.traced(fields),
            fallback=headers.fallback_of(fields),
        )
        return AdmissionRequest(
            request_id=name.request_id,
            fingerprint=name.fingerprint,
            body=body,
            params=params,
            timeout_s=_checked_timeout(fields.timeout),
            priority=fields.priority,
        )

    def _stop_ids(self, stop: Sequence[str], given: Sequence[int]) -> tuple[int, ...]:
        """The token ids that end the text: those `given`, and the special tokens that the strings `stop` name."""
        named = self.tokenizer.stop_ids(stop) if self.tokenizer is not None else ()
        return (*given, *(token for token in named if token < self.model.vocab_size and token not in given))

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Returns the tokens of each word: as the text begins with it, and as it follows a space where that differs.

        vLLM does the same. Raises BadRequest without a tokenizer and for words that are empty, or too many.
        """
        if len(words) > MAX_BAD_WORDS // 2:
            raise BadRequest(f"bad_words takes at most {MAX_BAD_WORDS // 2} words, not {len(words)}", param="bad_words")
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            if not word.strip():
                raise BadRequest("bad_words has an empty word", param="bad_words")
            for text in (word.lstrip(), " " + word.lstrip()):
                found[tuple(self.encode(text, "bad_words", add_special_tokens=False))] = None
        return tuple(found)


def _bias(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Returns the pairs of `logit_bias`, whose names are token ids. Raises BadRequest for other names."""
    for name in bias:
        if not (name.isascii() and name.isdecimal() and len(name) <= _ID_DIGITS):
            raise BadRequest(f"logit_bias: {name[:40]!r} is not a token id", param="logit_bias")
    return tuple((int(name), float(value)) for name, value in bias.items())


def _checked_timeout(seconds: float | None) -> float | None:
    """Returns the client's `timeout` (seconds). Raises BadRequest unless it is above 0 and at most MAX_TIMEOUT_S."""
    if seconds is not None and not 0 < seconds <= MAX_TIMEOUT_S:  # also false for NaN
        raise BadRequest(f"timeout must be above 0 and at most {MAX_TIMEOUT_S:g} seconds", param="timeout")
    return seconds


def _checked_salt(salt: str | None) -> str:
    """The salt of block hashes; "" without one. Raises BadRequest for one that is empty, too long or not text."""
    if salt is None:
        return ""
    if not 1 <= len(salt) <= MAX_SALT:
        raise BadRequest(f"cache_salt has 1 to {MAX_SALT} characters, not {len(salt)}", param="cache_salt")
    if "\0" in salt:  # a NUL separates the tenant from the salt in the block hash
        raise BadRequest("cache_salt has a NUL character", param="cache_salt")
    if any("\ud800" <= character <= "\udfff" for character in salt):
        raise BadRequest("cache_salt has half a surrogate pair", param="cache_salt")
    return salt


def _first(*values: Any) -> Any:
    """The first of `values` that is not None."""
    return next(value for value in values if value is not None)

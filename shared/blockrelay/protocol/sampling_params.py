"""Sampling parameters and stop conditions of a request.

`SamplingParams` checks itself when it is created, so each instance is valid. The gateway creates it from HTTP fields,
the command line from options, and a worker from a message; all three get the same one-line error that names the field.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

from blockrelay.errors import BadRequest, ContextLengthExceeded, WireError

#: Most alternatives that are returned for each token; OpenAI's limit.
MAX_LOGPROBS = 20
#: Stop strings per request, and characters of each, so that the text held back while matching stays bounded.
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 64
MAX_TEMPERATURE = 2.0
#: Most tokens with a bias, and the largest bias; OpenAI's limit is 100.
MAX_BIASED_TOKENS, MAX_BIAS = 1024, 100.0
#: Largest presence and frequency penalty; OpenAI's limit.
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 10.0
#: Sequences of tokens that may not be generated, and tokens of each.
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 64, 32
#: Most bytes of a grammar; one made of a JSON schema is a little longer than the schema.
MAX_GRAMMAR_BYTES = 1 << 17
#: Seeds are taken modulo 2**64; both spellings of a 64-bit number are accepted.
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling fields of one request.

    max_tokens      new tokens at most; 0 = none (only logits, or log probabilities of the prompt, are wanted)
    temperature     0 = greedy (then top_k, top_p, min_p and seed change nothing)
    top_k           keep the k most likely tokens; 0 = all
    top_p           then keep the smallest set whose probability reaches top_p; 1 = all
    min_p           then keep tokens at least min_p times as likely as the best one; 0 = all
    seed            None until the request has an id: then `derive_seed(id)`
    stop            strings that end the text; they are not part of it
    stop_token_ids  tokens that end the text besides the model's EOS ids
    ignore_eos      the model's EOS ids do not end the text
    logprobs        None = none; n = log probability of each new token and of the n most likely ones
    prompt_logprobs the same of each token of the prompt but the first (`encoding.prompt_logprobs`)
    logit_bias      tokens and what is added to their logits, -100 to 100
    presence_penalty, frequency_penalty
                    taken from the logits of generated tokens: once, and for each time that they came; -2 to 2
    repetition_penalty
                    divides the logits above 0 of all tokens so far, and multiplies the others; 1 = no change
    min_tokens      new tokens before which no EOS and no stop token is chosen, and no stop string ends the text
    bad_words       sequences of tokens whose last one is not chosen behind the others
    grammar         what the text follows, in the form of `blockrelay.text.grammars`; "" = anything
    use_cache       False: no KV is kept between tokens; each step computes all tokens before it again

    Raises BadRequest, whose `param` is the name of the wrong field.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""
    use_cache: bool = True

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise BadRequest("top_p must be above 0 and at most 1, not 0", param="top_p")
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, MIN_SEED, MAX_SEED)
        _check_stop(self.stop)
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise BadRequest(
                f"stop_token_ids takes at most {MAX_STOP_TOKENS} ids, not {len(self.stop_token_ids)}",
                param="stop_token_ids",
            )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)
        for name in ("ignore_eos", "use_cache"):
            if type(value := getattr(self, name)) is not bool:
                raise BadRequest(f"{name} must be true or false, not {value!r}", param=name)
        if self.logprobs is not None:
            check_logprobs(self.logprobs)
        if self.prompt_logprobs is not None:
            check_logprobs(self.prompt_logprobs, param="prompt_logprobs")
        _check_bias(self.logit_bias)
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY)
        _number("repetition_penalty", self.repetition_penalty, 0.0, MAX_REPETITION_PENALTY)
        if self.repetition_penalty == 0:
            raise BadRequest("repetition_penalty must be above 0, not 0", param="repetition_penalty")
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_bad_words(self.bad_words)
        _check_grammar(self.grammar, ignore_eos=self.ignore_eos)

    @property
    def changes_logits(self) -> bool:
        """Whether logits change before a token is drawn: then a draw depends on the tokens before it."""
        return bool(self.grammar) or self.edits_logits

    @property
    def edits_logits(self) -> bool:
        """Whether single logits change by something else than a grammar, which only masks them."""
        return bool(
            self.logit_bias
            or self.bad_words
            or self.min_tokens
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
        )

    def end_ids(self, eos_ids: Sequence[int]) -> frozenset[int]:
        """Returns the tokens that end this request; their text is never shown. `eos_ids` are the model's."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_ids))

    def to_dict(self) -> dict[str, object]:
        """Returns the fields as plain values for a message or a record; `from_dict` is the inverse."""
        plain = asdict(self)
        plain["stop"] = list(self.stop)
        plain["stop_token_ids"] = list(self.stop_token_ids)
        plain["logit_bias"] = [list(pair) for pair in self.logit_bias]
        plain["bad_words"] = [list(word) for word in self.bad_words]
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, object]) -> "SamplingParams":
        """Reads the dict of `to_dict`; a missing field has its default.

        Raises WireError for unknown fields and for stop fields that are no lists, BadRequest for values out of range.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(plain) - known)
        if unknown:
            raise WireError(f"sampling parameters have unknown fields {unknown}")
        values = dict(plain)
        for name in ("stop", "stop_token_ids"):
            value = values.get(name, ())
            if not isinstance(value, list | tuple):
                raise WireError(f"sampling parameter {name} is not a list")
            values[name] = tuple(value)
        for name in ("logit_bias", "bad_words"):
            rows = cast("Sequence[Any]", values.get(name, ()))
            if not isinstance(rows, list | tuple) or not all(isinstance(one, list | tuple) for one in rows):
                raise WireError(f"sampling parameter {name} is not a list of lists")
            values[name] = tuple(tuple(one) for one in rows)
        return cls(**values)  # pyright: ignore[reportArgumentType]  # __post_init__ checks every type


def derive_seed(identity: str) -> int:
    """Returns the seed of a request without one: below 2**53, so that every JSON client can send it back unchanged.

    Services pass the request id; the command line, which has none, passes the comma-separated prompt ids.
    """
    return int.from_bytes(hashlib.sha256(b"blockrelay-seed:" + identity.encode()).digest()[:8]) >> 11


def check_logprobs(value: object, *, param: str = "logprobs") -> None:
    """Raises BadRequest unless `value` is a number of alternatives that can be listed. `param`: the field's name."""
    _integer(param, value, 0, MAX_LOGPROBS)


def check_prompt(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    context: int,
    param: str = "prompt",
) -> None:
    """Checks that the model can run `prompt` (token ids) and then `params.max_tokens` new tokens.

    Raises ContextLengthExceeded if the prompt is longer than the context, or fills it and a new token is asked for.
    Raises BadRequest for an empty prompt, for a token id of the prompt or of `params` outside the vocabulary,
    and for too large a `max_tokens`. `context` is the model's number of positions. `param` is the client's name for the
    prompt field.
    """
    if not prompt:
        raise BadRequest(f"{param} is empty: at least one token is needed", param=param)
    for index, token in enumerate(prompt):
        if not 0 <= token < vocab_size:
            raise BadRequest(f"{param}: token id {token} at index {index} is not in 0..{vocab_size - 1}", param=param)
    named = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": [token for token, _ in params.logit_bias],
        "bad_words": [token for word in params.bad_words for token in word],
    }
    for name, ids in named.items():
        for token in ids:
            if token >= vocab_size:
                raise BadRequest(f"{name}: {token} is not in 0..{vocab_size - 1}", param=name)
    if len(prompt) > context or (len(prompt) == context and params.max_tokens):
        # The first half is OpenAI's sentence, which clients search for.
        message = f"This model's maximum context length is {context} tokens, and {param} has {len(prompt)}"
        raise ContextLengthExceeded(message, param=param)
    if len(prompt) + params.max_tokens > context:
        raise BadRequest(
            f"{param} has {len(prompt)} tokens and max_tokens is {params.max_tokens}: together beyond the model's "
            f"context of {context}",
            param="max_tokens",
        )


def _integer(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int:
        raise BadRequest(f"{name} must be a whole number, not {value!r}", param=name)
    if not low <= value <= high:
        raise BadRequest(f"{name} must be between {low} and {high}, not {value}", param=name)


def _number(name: str, value: object, low: float, high: float) -> None:
    if type(value) not in (int, float):
        raise BadRequest(f"{name} must be a number, not {value!r}", param=name)
    if not low <= value <= high:  # pyright: ignore[reportOperatorIssue]  # also false for NaN
        raise BadRequest(f"{name} must be between {low:g} and {high:g}, not {value}", param=name)


def _check_stop(stop: object) -> None:
    if not isinstance(stop, tuple) or not all(isinstance(text, str) for text in stop):
        raise BadRequest("stop must be a string or a list of strings", param="stop")
    texts: tuple[str, ...] = stop
    if len(texts) > MAX_STOP_STRINGS:
        raise BadRequest(f"stop takes at most {MAX_STOP_STRINGS} strings, not {len(texts)}", param="stop")
    for text in texts:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise BadRequest(f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters, not {len(text)}", param="stop")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise BadRequest("a stop string holds half of a surrogate pair, which no text can contain", param="stop")


def _check_bias(bias: object) -> None:
    pairs: tuple[Any, ...] = cast("tuple[Any, ...]", bias) if isinstance(bias, tuple) else (None,)
    if not all(isinstance(pair, tuple) and len(cast("tuple[Any, ...]", pair)) == 2 for pair in pairs):
        raise BadRequest("logit_bias must be pairs of a token id and a number", param="logit_bias")
    if len(pairs) > MAX_BIASED_TOKENS:
        raise BadRequest(f"logit_bias takes at most {MAX_BIASED_TOKENS} tokens, not {len(pairs)}", param="logit_bias")
    for token, number in pairs:
        _integer("logit_bias", token, 0, 2**31 - 1)
        _number("logit_bias", number, -MAX_BIAS, MAX_BIAS)
    if len({token for token, _ in pairs}) < len(pairs):
        raise BadRequest("logit_bias names a token twice", param="logit_bias")


def _check_bad_words(words: object) -> None:
    sequences: tuple[Any, ...] = cast("tuple[Any, ...]", words) if isinstance(words, tuple) else (None,)
    if len(sequences) > MAX_BAD_WORDS:
        raise BadRequest(f"bad_words takes at most {MAX_BAD_WORDS} words, not {len(sequences)}", param="bad_words")
    for word in sequences:
        tokens = cast("tuple[Any, ...]", word) if isinstance(word, tuple) else ()
        if not 1 <= len(tokens) <= MAX_BAD_WORD_TOKENS:
            raise BadRequest(f"a bad word has 1 to {MAX_BAD_WORD_TOKENS} tokens", param="bad_words")
        for token in tokens:
            _integer("bad_words", token, 0, 2**31 - 1)


def _check_grammar(grammar: object, *, ignore_eos: bool) -> None:
    if not isinstance(grammar, str):
        raise BadRequest("a grammar is text", param="response_format")
    if len(grammar.encode("utf-8", "replace")) > MAX_GRAMMAR_BYTES:
        raise BadRequest(f"a grammar has at most {MAX_GRAMMAR_BYTES} bytes", param="response_format")
    if grammar and ignore_eos:
        raise BadRequest("ignore_eos has no effect on a text that follows a grammar: leave it out", param="ignore_eos")

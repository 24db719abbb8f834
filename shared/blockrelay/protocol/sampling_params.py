"""Sampling parameters and stop conditions of a request.

`SamplingParams` checks itself when it is created, so each instance is valid. The gateway creates it from HTTP fields,
the command line from options, and a worker from a message; all three get the same one-line error that names the field.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from blockrelay.errors import BadRequest, ContextLengthExceeded, WireError

#: Most alternatives that are returned for each token; OpenAI's limit.
MAX_LOGPROBS = 20
#: Stop strings per request, and characters of each, so that the text held back while matching stays bounded.
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 64
MAX_TEMPERATURE = 2.0
#: Seeds are taken modulo 2**64; both spellings of a 64-bit number are accepted.
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling fields of one request.

    max_tokens      new tokens at most; 0 = none (a tensor step wants logits only)
    temperature     0 = greedy (then top_k, top_p, min_p and seed change nothing)
    top_k           keep the k most likely tokens; 0 = all
    top_p           then keep the smallest set whose probability reaches top_p; 1 = all
    min_p           then keep tokens at least min_p times as likely as the best one; 0 = all
    seed            None until the request has an id: then `derive_seed(id)`
    stop            strings that end the text; they are not part of it
    stop_token_ids  tokens that end the text besides the model's EOS ids
    ignore_eos      the model's EOS ids do not end the text
    logprobs        None = none; n = log probability of each new token and of the n most likely ones
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

    def end_ids(self, eos_ids: Sequence[int]) -> frozenset[int]:
        """Returns the tokens that end this request; their text is never shown. `eos_ids` are the model's."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_ids))

    def to_dict(self) -> dict[str, object]:
        """Returns the fields as plain values for a message or a record; `from_dict` is the inverse."""
        plain = asdict(self)
        plain["stop"] = list(self.stop)
        plain["stop_token_ids"] = list(self.stop_token_ids)
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
    Raises BadRequest for an empty prompt, for a token id (of the prompt or `stop_token_ids`) outside the vocabulary,
    and for too large a `max_tokens`. `context` is the model's number of positions. `param` is the client's name for the
    prompt field.
    """
    if not prompt:
        raise BadRequest(f"{param} is empty: at least one token is needed", param=param)
    for index, token in enumerate(prompt):
        if not 0 <= token < vocab_size:
            raise BadRequest(f"{param}: token id {token} at index {index} is not in 0..{vocab_size - 1}", param=param)
    for token in params.stop_token_ids:
        if token >= vocab_size:
            raise BadRequest(f"stop_token_ids: {token} is not in 0..{vocab_size - 1}", param="stop_token_ids")
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

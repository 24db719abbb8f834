"""Builds what answers show of prompts: their text (`echo`) and the log probabilities of their tokens. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from blockrelay.protocol.encoding.prompt_logprobs import PromptLogprobs
from blockrelay.text.tokenizer import IncrementalText, Tokenizer
from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.streaming.active_requests.active_request import ActiveRequest

#: Estimated bytes that one number of an answer takes here, with its token's id and text, until it is sent.
BYTES_A_VALUE = 600
#: Returns the name of a token by its id, as completions list it.
NameOf = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """The prompt of a request as an echo shows it."""

    text: str
    """The text of all tokens; special tokens have none."""
    offsets: list[int]
    """For each token the number of characters before its own text."""


def answer_bytes(requests: Sequence[ActiveRequest | AdmissionRequest]) -> int:
    """Estimates the memory of an answer that lists the prompts of `requests`; 0 where they ask for no numbers."""
    values = sum(
        int(one.body.prompt.size) * (one.params.prompt_logprobs + 1)
        for one in requests
        if one.params.prompt_logprobs is not None
    )
    return values * BYTES_A_VALUE


def scores_of(active: ActiveRequest) -> PromptLogprobs:
    """Reads the log probabilities of a prompt from the end of its request, which has ended well and asked for them.

    Raises WireError if the end does not have them.
    """
    assert active.end is not None, "the request has ended"
    return PromptLogprobs.decode(active.end.meta.get("prompt_logprobs"), tokens=active.body.prompt.size)


def echoed(tokenizer: Tokenizer | None, prompt: Sequence[int]) -> EchoedPrompt:
    """Returns the prompt's text. A character that ends in the answer is part of the answer's text.

    Without a tokenizer the text is empty.
    """
    offsets, texts, end = list[int](), list[str](), 0
    text = None if tokenizer is None else IncrementalText(tokenizer)
    for token in prompt:
        offsets.append(end)
        texts.append("" if text is None else text.push(token))
        end += len(texts[-1])
    return EchoedPrompt("".join(texts), offsets)


def legacy_lists(
    prompt: Sequence[int], echo: EchoedPrompt, scores: PromptLogprobs, listed: int, name_of: NameOf
) -> dict[str, list[Any]]:
    """Returns the prompt's part of a completion's `logprobs`, in OpenAI's legacy form, with `listed` alternatives.

    The first token has none. The token itself is always among its alternatives.
    """
    names = [name_of(token) for token in prompt]
    logprobs: list[float] = scores.logprobs.tolist()
    tops = [
        {name_of(other): value for other, value in zip(ids, values, strict=True)} | {name: own}
        for name, own, ids, values in zip(names[1:], logprobs, *_listed(scores, listed), strict=True)
    ]
    return {
        "tokens": names,
        "token_logprobs": [None, *logprobs],
        "top_logprobs": [None, *tops],
        "text_offset": echo.offsets,
    }


def by_token(
    prompt: Sequence[int], scores: PromptLogprobs, listed: int, tokenizer: Tokenizer | None
) -> list[dict[str, Any] | None]:
    """Returns the field `prompt_logprobs` as vLLM has it: for each token a dict by token id, of `listed` alternatives.

    The first token has None. The token itself comes first in its dict, then the alternatives, the most likely first.
    """
    shown: list[dict[str, Any] | None] = [None]
    ranks: list[int] = scores.ranks.tolist()
    logprobs: list[float] = scores.logprobs.tolist()
    for token, logprob, rank, ids, values in zip(prompt[1:], logprobs, ranks, *_listed(scores, listed), strict=True):
        row = {str(token): _one(token, logprob, rank, tokenizer)}
        for place, (other, value) in enumerate(zip(ids, values, strict=True), 1):
            row.setdefault(str(other), _one(other, value, place, tokenizer))
        shown.append(row)
    return shown


def _listed(scores: PromptLogprobs, listed: int) -> tuple[list[list[int]], list[list[float]]]:
    """The ids and log probabilities of the `listed` most likely tokens in place of each; there may be fewer."""
    return scores.top_ids[:, :listed].tolist(), scores.top_logprobs[:, :listed].tolist()


def _one(token: int, logprob: float, rank: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    decoded = None if tokenizer is None else tokenizer.token_bytes(token).decode("utf-8", "replace")
    return {"logprob": logprob, "rank": rank, "decoded_token": decoded}

"""Where a request ends: the one place that decides it."""

from blockrelay.sampling_params import SamplingParams
from blockrelay.text import Tokenizer


class Progress:
    """How far one request has come: everything `advance` needs, a function of its tokens alone."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_tokens: int,
        context: int,
        eos_ids: tuple[int, ...],
        tokenizer: Tokenizer | None,
    ) -> None:
        """`context` and `eos_ids` are the model's; `tokenizer` may be None if params.stop is empty."""
        raise NotImplementedError


def advance(progress: Progress, token: int) -> str | None:
    """Take one new token; returns None (go on), "stop" (EOS, stop token or stop string) or "length".

    Mutates `progress`. Nothing behind a token that returned a reason may be committed.
    """
    raise NotImplementedError

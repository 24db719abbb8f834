"""Decides where a request ends. No other code does."""

from collections.abc import Collection
from typing import Literal

from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.text.grammars import GrammarState
from blockrelay.text.tokenizer import Tokenizer, TokenList, VisibleText

FinishReason = Literal["stop", "length"]


class Progress:
    """The progress of one request towards its end: the state of `advance`, a function of the request's tokens alone.

    A worker that takes over a request creates a new one and calls `advance` with each token of the log; none of them
    ends the request, or it would not be running.
    """

    __slots__ = ("end_ids", "finish_reason", "grammar", "length", "limit", "text")

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt: TokenList,
        context: int,
        eos_ids: tuple[int, ...],
        tokenizer: Tokenizer | None,
        grammar: GrammarState | None = None,
        shown: Collection[int] = (),
    ) -> None:
        """`context` (the maximum number of tokens, prompt included) and `eos_ids` are the model's.

        `tokenizer` may be None if params.stop is empty. `grammar` is that of the request, before its first new token.
        `shown` has special tokens whose names are part of the text.
        """
        assert tokenizer is not None or not params.stop, "stop strings need a tokenizer; requests are checked for it"
        self.end_ids = params.end_ids(eos_ids)
        #: What the text follows; None: anything.
        self.grammar = grammar
        #: Number of tokens so far, prompt included.
        self.length = len(prompt)
        #: Maximum number of tokens, prompt included.
        self.limit = min(len(prompt) + params.max_tokens, context)
        # Text is only needed to find stop strings; without them no token is decoded here.
        self.text = None
        if tokenizer is not None and params.stop:
            self.text = VisibleText(tokenizer, params, eos_ids, prompt, shown)
        #: Why the request ended; None before. "length" from the start if it may not have a single new token.
        self.finish_reason: FinishReason | None = "length" if self.length >= self.limit else None


def advance(progress: Progress, token: int) -> FinishReason | None:
    """Takes one new token; returns None (go on), "stop" (EOS, stop token, stop string, end of a grammar) or "length".

    Changes `progress`. The token that ends a request belongs to it; nothing behind it may be committed. Must not be
    called after the end.
    """
    assert progress.finish_reason is None, "a finished request got another token"
    progress.length += 1
    if token in progress.end_ids:
        progress.finish_reason = "stop"
        return "stop"
    if progress.grammar is not None:
        progress.grammar.push([token])
    if progress.text is not None:
        progress.text.push(token)
        if progress.text.stopped:
            progress.finish_reason = "stop"
            return "stop"
    if progress.grammar is not None and progress.grammar.is_complete:
        progress.finish_reason = "stop"
    elif progress.length >= progress.limit:
        progress.finish_reason = "length"
    return progress.finish_reason

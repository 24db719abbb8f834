"""Grammars that an answer follows, by llguidance: which tokens may come next, and which ones must.

All of it is a function of a grammar and the tokens so far, so any worker goes on where another one stopped. A grammar
is text: one in Lark's notation, or llguidance's JSON form of a JSON schema or a regular expression.

llguidance is optional (`blockrelay[structured]`); this module is imported without it too.
"""

import hashlib
import importlib.util
import re
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import ModelConfig
from blockrelay.errors import BadRequest
from blockrelay.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: Names of special tokens that a Lark grammar can have.
_NAMED = re.compile(r"<[^<>\s\[]+>")
#: What a service without the library tells its users.
MISSING = (
    "structured output needs the package llguidance, which is not installed here: pip install 'blockrelay[structured]'"
)
#: Forced tokens after which a grammar is looked at no further: a schema that contains itself forces them for ever.
LONGEST_FORCED = 4096
#: Work in one step of a grammar (items of its parser, and fuel of its lexer: about 5 ms each on a slow core), and
#: states of its lexer (about 2 KB each). A quarter of the library's own limits: other requests wait for this one.
STEP_ITEMS, STEP_FUEL, LEXER_STATES = 12_500, 50_000, 50_000
#: Rules that may be open at one place of a text. A schema with 200 optional properties has 800; an ambiguous grammar
#: opens more with every token, and the work grows with their square.
SCHEMA_RULES, GRAMMAR_RULES = 1000, 300
#: Fuel for building a lexer, about 5 ms, and symbols of a grammar. A quarter of the library's own limits.
BUILD_FUEL, GRAMMAR_SYMBOLS = 250_000, 125_000


def is_installed() -> bool:
    """Returns whether this environment has llguidance."""
    return importlib.util.find_spec("llguidance") is not None


class Grammars:
    """Reads grammars for the tokens of one model. Immutable, and safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, model: ModelConfig) -> None:
        """Needs the library, and a model with end tokens; `grammars_of` checks both."""
        self._tokenizer, self._context = tokenizer, model.max_position
        self._vocab_size, self._eos_ids = model.vocab_size, list(model.eos_ids)
        self._tokens: LLTokenizer | None = None
        digest = hashlib.sha256(f"{self._vocab_size} {self._eos_ids} {tokenizer.definition}".encode()).hexdigest()
        #: Names what decides which tokens a grammar allows. Only workers of one id continue each other's answers.
        self.id = f"llguidance-{version('llguidance')}-{digest[:12]}"

    def prepare(self) -> None:
        """Makes what all grammars need, half a second for 128,000 tokens: so the first request does not wait for it."""
        self._library_tokens()

    def problem(self, grammar: str) -> str:
        """Returns in one line why no answer could follow `grammar`; "" if one can."""
        state, room = self.follow(grammar), min(self._context, LONGEST_FORCED)
        while not state.error and state.length < room and (forced := state.forced(room)):
            state.push(forced)
        if not state.error and not state.is_complete:
            state.masks(())
        if state.length >= room and not state.is_complete:
            return f"a text of it begins with at least {room} tokens that leave no choice, as one without end does"
        return state.error

    def symbol(self, text: str) -> str | None:
        """Returns how Lark grammars name the token spelled `text`, which no quoted text matches; None if one does."""
        token = self._tokenizer.token_id(text)
        if token is None or token >= self._vocab_size or not self._library_tokens().is_special_token(token):
            return None
        return text if _NAMED.fullmatch(text) else f"<[{token}]>"

    def unquoted(self, but: str) -> list[int]:
        """Returns the ids of tokens that are part of texts, like `<think>`, although no quoted text matches them.

        The token spelled `but` is left out.
        """
        special, has_text = self._library_tokens().is_special_token, self._tokenizer.bytes.of
        added = sorted(self._tokenizer.added_tokens().items())
        return [
            token
            for token, text in added
            if token < self._vocab_size and text != but and special(token) and has_text(token)
        ]

    def follow(self, grammar: str) -> "GrammarState":
        """Returns the state of `grammar` before the first token. A wrong one gives a state with an error."""
        from llguidance import LLMatcher, LLParserLimits

        tokens = self._library_tokens()
        limits = LLParserLimits(
            initial_lexer_fuel=BUILD_FUEL,
            step_lexer_fuel=STEP_FUEL,
            step_max_items=STEP_ITEMS,
            max_items_in_row=SCHEMA_RULES if _has_schema(grammar) else GRAMMAR_RULES,
            max_lexer_states=LEXER_STATES,
            max_grammar_size=GRAMMAR_SYMBOLS,
            verbose_errors=False,
        )
        return GrammarState(
            lambda: LLMatcher(tokens, grammar, log_level=0, limits=limits), self._vocab_size, frozenset(self._eos_ids)
        )

    def _library_tokens(self) -> "LLTokenizer":
        """Returns the vocabulary in the library's form, made at the first use."""
        if self._tokens is None:
            from llguidance import LLTokenizer

            self._tokens = LLTokenizer(self._tokenizer.definition, n_vocab=self._vocab_size, eos_token=self._eos_ids)
        return self._tokens


class GrammarState:
    """How far one answer has come in its grammar. Not thread-safe.

    Limits of the library count work, never time. One of them counts all work of a state, which may have gone other
    ways than a new one; so a new state decides whether a limit was reached.
    """

    def __init__(self, start: Callable[[], "LLMatcher"], vocab_size: int, eos_ids: frozenset[int]) -> None:
        """`start` returns a matcher before the first token."""
        self._start, self._words, self._eos_ids = start, -(-vocab_size // 32), eos_ids
        self._matcher, self._pushed = start(), list[int]()
        #: Why the answer cannot go on; "" if it can.
        self.error = _said(self._matcher)

    @property
    def length(self) -> int:
        """Number of tokens so far, an end token not among them."""
        return len(self._pushed)

    @property
    def is_complete(self) -> bool:
        """Whether the answer is whole and nothing may follow it."""
        return not self.error and self._matcher.is_stopped()

    def push(self, tokens: Sequence[int]) -> None:
        """Adds the tokens that follow, which masks have allowed; behind an error this does nothing."""
        self._pushed += tokens
        if not self.error and not self._matcher.consume_tokens(list(tokens)):
            self._restart()

    def takes(self, tokens: Sequence[int]) -> bool:
        """Adds tokens that no mask has seen, and returns whether they end the answer or may end it."""
        self.push(tokens)
        return not self.error and self._matcher.is_accepting()

    def forced(self, limit: int) -> list[int]:
        """Returns up to `limit` tokens of which each is the only one that may follow; [] behind an error."""
        if self.error or limit < 1 or self._matcher.is_stopped():
            return []
        return self._matcher.compute_ff_tokens()[:limit]

    def masks(self, drafts: Sequence[int]) -> list[NDArray[np.uint32]]:
        """Returns which tokens may follow now, and behind each of `drafts`, up to the first that may not follow.

        Bit i % 32 of word i / 32 of a mask stands for token i. Where some token is forced it is the only one, even if
        others would spell the same text. If the answer cannot go on, `error` says why, and the list is empty.
        """
        found = list[NDArray[np.uint32]]()
        taken, before = 0, self._matcher
        kept = before.deep_copy() if drafts else before  # 1 us; the library does not take all tokens back rightly
        while (mask := self._mask(drafts[:taken])) is not None:
            found.append(mask)
            if taken == len(drafts) or (draft := drafts[taken]) in self._eos_ids:
                break
            if not mask[draft // 32] >> np.uint32(draft % 32) & np.uint32(1):
                break
            taken += 1
            if not self._matcher.consume_token(draft):
                break
        if not found:
            self.error = self.error or "no token may follow"
        elif self._matcher is before and (taken or not before.is_error()):
            self._matcher = kept
        else:
            self._restart()
        return found

    def _mask(self, drafts: Sequence[int]) -> NDArray[np.uint32] | None:
        """Returns the mask behind `drafts`, which the matcher has; None where a limit is reached or nothing follows."""
        if self.error:
            return None
        mask = np.zeros(self._words, np.uint32)
        if forced := self._matcher.compute_ff_tokens()[:1]:
            mask[forced[0] // 32] = np.uint32(1 << forced[0] % 32)
            return mask
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            self._matcher = self._start()
            self._matcher.consume_tokens([*self._pushed, *drafts])
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._matcher.is_error() and not drafts:
                self.error = _said(self._matcher)
        ends = self._matcher.is_stopped() and not self._matcher.is_accepting()
        return None if self._matcher.is_error() or ends or not mask.any() else mask

    def _restart(self) -> None:
        """Reads all tokens again with a new matcher. Sets `error` if that reaches a limit too."""
        self._matcher = self._start()
        self._matcher.consume_tokens(list(self._pushed))
        self.error = _said(self._matcher)


def _said(matcher: "LLMatcher") -> str:
    """Returns the error of a matcher in one line, at most 200 characters; "" without one."""
    error = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:200]
    return error if " " in error or not error else f"no token may follow ({error})"


def _has_schema(grammar: str) -> bool:
    """Returns whether a grammar is made of JSON schemas, perhaps among other things."""
    return '"json_schema":{' in grammar or "%json" in grammar


def grammars_of(tokenizer: Tokenizer | None, model: ModelConfig) -> Grammars | None:
    """Returns the reader of grammars for a model; None without the library, a tokenizer or end tokens."""
    return Grammars(tokenizer, model) if tokenizer is not None and model.eos_ids and is_installed() else None


def checked_grammars(grammars: Grammars | None, param: str) -> Grammars:
    """Returns `grammars`. Raises BadRequest, which names the field `param`, if there are none."""
    if grammars is not None:
        return grammars
    if not is_installed():
        raise BadRequest(MISSING, param=param)
    raise BadRequest("the model has no tokenizer or no end token: structured output needs both", param=param)

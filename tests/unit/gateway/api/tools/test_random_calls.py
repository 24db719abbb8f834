"""Calls that grammars let through parse and fit their schemas, in every form and vocabulary, however they are cut."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.protocol.messages import EndEntry, TokenEntry
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.text.grammars import Grammars, GrammarState, grammars_of
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.api.openai.answer_parts import cutter_of, delta_of, message_of
from blockrelay_gateway.api.openai.tools.answers import calls_of
from blockrelay_gateway.api.openai.tools.cutter import Piece
from blockrelay_gateway.api.openai.tools.formats import FORMS, MARKS, CallForm
from blockrelay_gateway.api.openai.tools.grammar import grammar_of_calls
from blockrelay_gateway.api.structured_output import StructuredOutput
from blockrelay_gateway.streaming.deltas import Relay
from tests.support.project import ROOT

STORYTELLER = ROOT / "shared/blockrelay/models/storyteller"
#: The first id that the bundled model's tokenizer does not use; the model has room behind it.
FREE = 1168
EOS = (0, 1)
LONGEST = 400
_AWKWARD = ['"}{', "\\", "<tool_call>", "[TOOL_CALLS]"]
SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "get": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"enum": [1, 2.5, None]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "get_all": {"type": "object", "properties": {}, "additionalProperties": False},
    "nested-1": {
        "type": "object",
        "properties": {
            "o": {"type": "object", "properties": {"}{": {"enum": _AWKWARD}}, "required": ["}{"]},
            "l": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["o", "l"],
        "additionalProperties": False,
    },
}
#: Of an answer whose texts spell the marks of calls.
_MARKED: Mapping[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": _AWKWARD}, "b": {"enum": [f"x{mark}" for mark in _AWKWARD]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer whose tokens spell the marks of calls in one of three ways."""

    tokenizer: Tokenizer
    grammars: Grammars
    endings: np.ndarray
    """Whether each token may end a string, list or object."""


def vocabulary(kind: str) -> Vocabulary:
    folder = open_block_folder(STORYTELLER, blocks=())
    definition = json.loads(Path(STORYTELLER / "tokenizer.json").read_text())
    words = {"texts": (), "tokens": (*MARKS, "<think>", "</think>"), "special tokens": MARKS}[kind]
    for token, content in enumerate(words, FREE):
        added = {"id": token, "content": content, "special": kind == "special tokens"}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        definition["added_tokens"].append(added | flags)
    tokenizer = Tokenizer(json.dumps(definition))
    grammars = grammars_of(tokenizer, folder.model)
    assert grammars is not None
    size = folder.model.vocab_size
    endings = np.array([tokenizer.token_bytes(token)[:1] in (b'"', b"}", b"]") for token in range(size)])
    return Vocabulary(tokenizer, grammars, endings)


@pytest.fixture(scope="module", params=["texts", "tokens", "special tokens"])
def words(request: pytest.FixtureRequest) -> Vocabulary:
    return vocabulary(request.param)


def allowed(state: GrammarState) -> np.ndarray:
    (mask,) = state.masks(())
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def walk(words: Vocabulary, grammar: str, form: CallForm, rng: Random) -> tuple[list[int], bool]:
    """The tokens of a random answer, which calls something sooner or later, and whether it ended by itself."""
    state, tokens = words.grammars.follow(grammar), list[int]()
    trigger = words.tokenizer.encode(form.trigger, add_special_tokens=False)
    words_before, begun = rng.randint(0, 3), False
    while not state.is_complete and len(tokens) < LONGEST:
        may_follow = allowed(state)
        if not begun and len(tokens) == words_before:
            begun = True
            start = words.tokenizer.encode('{"', add_special_tokens=False)[:1] if form.leading else trigger
            if all(_push(state, tokens, token) for token in start):
                continue
            may_follow = allowed(state)
        soon = may_follow[words.endings[may_follow]]
        token = int(rng.choice((soon if len(soon) and rng.random() < 0.4 else may_follow).tolist()))
        if token in EOS:
            return tokens, True
        tokens.append(token)
        state.push([token])
    return tokens, state.is_complete


def _push(state: GrammarState, tokens: list[int], token: int) -> bool:
    if token not in allowed(state):
        return False
    state.push([token])
    tokens.append(token)
    return True


def entries(tokens: Sequence[int], *, ended: bool) -> list[TokenEntry | EndEntry]:
    log: list[TokenEntry | EndEntry] = [TokenEntry(position=at, token=token) for at, token in enumerate(tokens, 1)]
    return [
        *log,
        EndEntry(position=len(tokens) + 1, reason="stop" if ended else "length", meta={}, fallbacks=(), numerics=""),
    ]


def pieces_by_position(words: Vocabulary, form: CallForm, tokens: Sequence[int], *, ended: bool) -> list[list[Piece]]:
    """What a stream has in the event of each position, from whatever gateway."""
    shown = [token for mark in form.marks for token in words.tokenizer.bytes.specials(mark)]
    relay, cutter = Relay(words.tokenizer, SamplingParams(), EOS, (), shown), cutter_of(form.name, "")
    assert cutter is not None
    found: list[list[Piece]] = []
    for entry in entries(tokens, ended=ended):
        delta = relay.push(entry)
        found.append([*cutter.push(delta.text), *(cutter.finish() if delta.end else [])])
    return found


def text_of(words: Vocabulary, form: CallForm, tokens: Sequence[int], *, ended: bool = True) -> str:
    shown = [token for mark in form.marks for token in words.tokenizer.bytes.specials(mark)]
    relay = Relay(words.tokenizer, SamplingParams(), EOS, (), shown)
    return "".join(relay.push(entry).text for entry in entries(tokens, ended=True)[: None if ended else -1])


def joined(deltas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of deltas. Id, type and name come once, in the first delta of a call."""
    content, calls = "", list[dict[str, Any]]()
    for delta in deltas:
        content += delta.get("content", "")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(calls):
                calls.append({name: call[name] for name in ("id", "type", "function")})
                continue
            assert call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"}
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {"content": content or None, "tool_calls": calls} if calls else {"content": content}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("count", [5, pytest.param(100, marks=[pytest.mark.thorough, pytest.mark.timeout(1800)])])
def test_random_calls(words: Vocabulary, form: CallForm, required: bool, count: int) -> None:
    structured = StructuredOutput(words.grammars)
    functions = {name: structured.json_grammar(schema, "tools") for name, schema in SCHEMAS.items()}
    made = 0
    for seed in range(count):
        rng, several = Random(seed), seed % 2 == 0
        grammar = grammar_of_calls(form, functions, words.grammars, required=required, several=several)
        tokens, ended = walk(words, grammar, form, rng)
        text = text_of(words, form, tokens)
        message, whole = message_of(text, form.name, "", "r")
        calls = message.get("tool_calls", [])
        assert several or len(calls) <= 1
        if ended and (required or form.trigger in text):
            assert whole and calls, text
            made += 1
        for call in calls if ended else calls[:-1]:
            arguments = json.loads(call["function"]["arguments"])
            Draft202012Validator(SCHEMAS[call["function"]["name"]]).validate(arguments)
        if not calls and not (required or form.trigger in text):
            assert message == {"content": text}
        check_cuts(words, form, tokens, text, rng, ended=ended)
        check_drafts(words, grammar, tokens, rng)
    assert made >= count // 3 or form.leading, made


@pytest.mark.parametrize("form", [form for form in FORMS.values() if not form.braced], ids=lambda form: form.name)
@pytest.mark.parametrize("count", [5, pytest.param(100, marks=[pytest.mark.thorough, pytest.mark.timeout(1800)])])
def test_random_answers_that_are_calls_or_json(words: Vocabulary, form: CallForm, count: int) -> None:
    structured, either, made = StructuredOutput(words.grammars), form.beside_json(), [0, 0]
    functions = {name: structured.json_grammar(schema, "tools") for name, schema in SCHEMAS.items()}
    answer = structured.json_grammar(_MARKED, "answer")
    grammar = grammar_of_calls(either, functions, words.grammars, required=False, several=True, answer=answer)
    for seed in range(count):
        rng = Random(seed)
        first = replace(either, leading=seed % 2 == 0)  # a walk begins with a brace where calls lead
        tokens, ended = walk(words, grammar, first, rng)
        text = text_of(words, either, tokens)
        message, whole = message_of(text, either.name, "", "r")
        called = text.startswith(form.trigger)
        assert ("tool_calls" in message) >= (called and whole) and not (whole and not called)
        if ended and not called:
            assert message == {"content": text}, "JSON is content, whatever its texts spell"
            Draft202012Validator(_MARKED).validate(json.loads(text))
        made[called] += ended
        check_cuts(words, either, tokens, text, rng, ended=ended)
    assert all(made) or count < 20, made


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_behind_a_trigger_that_is_spelled_letter_by_letter_nothing_but_a_call_follows(
    words: Vocabulary, form: CallForm
) -> None:
    functions = {"f": StructuredOutput(words.grammars).json_grammar(SCHEMAS["get_all"], "tools")}
    grammar = grammar_of_calls(form, functions, words.grammars, required=False, several=True)
    state = words.grammars.follow(grammar)
    for letter in f"{'' if form.leading else 'Hi '}{form.trigger} there":
        (token,) = words.tokenizer.encode(letter, add_special_tokens=False)
        if not _push(state, [], token):
            break
    else:
        raise AssertionError("this text would be cut as calls, and is none")


def check_cuts(
    words: Vocabulary, form: CallForm, tokens: Sequence[int], text: str, rng: Random, *, ended: bool
) -> None:
    """The deltas of any positions are those of a stream from the start, and joined they are the whole answer."""
    message, _ = message_of(text, form.name, "", "r")
    by_position = pieces_by_position(words, form, tokens, ended=ended)
    deltas = [delta_of(pieces, "r") for pieces in by_position]
    assert joined(deltas) == message
    for position in rng.sample(range(len(tokens) + 1), min(5, len(tokens) + 1)):
        again = pieces_by_position(words, form, tokens[:position], ended=False)
        assert again[:position] == by_position[:position], "what a position adds does not depend on later tokens"
        so_far = calls_of([piece for pieces in by_position[:position] for piece in pieces], "r")
        begun = text_of(words, form, tokens[:position], ended=False)
        assert message_of(begun, form.name, "", "r")[0].get("tool_calls", []) == so_far
    cutter = cutter_of(form.name, "")
    assert cutter is not None
    cuts = sorted(rng.choices(range(len(text) + 1), k=4))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    pieces = [piece for part in parts for piece in cutter.push(part)] + cutter.finish()
    assert joined([delta_of(pieces, "r")]) == message


def check_drafts(words: Vocabulary, grammar: str, tokens: Sequence[int], rng: Random) -> None:
    """Masks behind drafts, which may be tokens that are special, are those of a state that has these tokens."""
    start = rng.randint(0, len(tokens))
    drafts, state = tokens[start : start + 4], words.grammars.follow(grammar)
    state.push(tokens[:start])
    for _ in range(2):  # the second time behind drafts that were taken back
        for taken, mask in enumerate(state.masks(drafts)):
            fresh = words.grammars.follow(grammar)
            fresh.push(tokens[: start + taken])
            if not fresh.is_complete:
                assert np.array_equal(fresh.masks(())[0], mask)

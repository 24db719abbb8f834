"""What may follow by a grammar is a function of the grammar and the tokens so far."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.block_folder.model import ModelConfig
from blockrelay.text.grammars import Grammars, GrammarState, grammars_of
from blockrelay.text.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["old", "young"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def schema(value: Mapping[str, Any]) -> str:
    form: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return LLMatcher.grammar_from_json_schema(json.dumps(value), overrides=form)


@pytest.fixture(scope="module")
def folder(tiny_model: Path) -> BlockFolder:
    return open_block_folder(tiny_model, blocks=())


@pytest.fixture(scope="module")
def model(folder: BlockFolder) -> ModelConfig:
    return folder.model


@pytest.fixture(scope="module")
def tokenizer(folder: BlockFolder) -> Tokenizer:
    assert folder.tokenizer_path is not None
    return Tokenizer.from_file(folder.tokenizer_path)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer, model: ModelConfig) -> Grammars:
    found = grammars_of(tokenizer, model)
    assert found is not None
    return found


def ids(mask: np.ndarray) -> list[int]:
    """The tokens of a mask."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(state: GrammarState, seed: int, most: int = 200) -> list[int]:
    """Pushes tokens at random from what is allowed, until the text is complete."""
    rng, tokens = np.random.default_rng(seed), list[int]()
    while not state.is_complete and len(tokens) < most:
        allowed = ids(state.masks(())[0])
        # Short texts: the end of a string or number, where it may come, comes often.
        tokens.append(int(rng.choice(allowed if rng.random() < 0.5 else allowed[:40])))
        state.push(tokens[-1:])
    return tokens


def test_texts_follow_the_schema(grammars: Grammars, tokenizer: Tokenizer) -> None:
    for seed in range(20):
        state = grammars.follow(schema(PERSON))
        tokens = walk(state, seed)
        assert state.is_complete and not state.error
        person = json.loads(tokenizer.decode(tokens))
        assert set(person) == {"name", "age", "tags"} and 0 <= person["age"] <= 150


def test_a_state_depends_on_the_tokens_alone(grammars: Grammars) -> None:
    """Also after masks for drafts that were wrong, and for a state that begins in the middle."""
    rng = np.random.default_rng(5)
    for seed in range(4):
        tokens = walk(grammars.follow(schema(PERSON)), seed)
        went_along = grammars.follow(schema(PERSON))
        for at in range(len(tokens)):
            began_here = grammars.follow(schema(PERSON))
            began_here.push(tokens[:at])
            went_along.masks(tokens[at : at + 3])
            went_along.masks(rng.integers(0, 500, 4).tolist())
            assert went_along.forced(9) == began_here.forced(9)
            assert ids(went_along.masks(())[0]) == ids(began_here.masks(())[0])
            went_along.push(tokens[at : at + 1])


def test_forced_tokens_are_the_only_ones(grammars: Grammars, tokenizer: Tokenizer) -> None:
    state = grammars.follow(schema(PERSON))
    forced = state.forced(50)
    assert tokenizer.decode(forced) == '{"name": "'[: len(tokenizer.decode(forced))] and len(forced) > 2
    masks = state.masks(forced)
    assert [ids(mask) for mask in masks[: len(forced)]] == [[token] for token in forced]
    assert len(masks) == len(forced) + 1, "one more, behind the last"
    assert state.forced(2) == forced[:2] and state.length == 0, "nothing was pushed"


def test_masks_end_at_a_draft_that_may_not_follow(grammars: Grammars, model: ModelConfig) -> None:
    state = grammars.follow(schema({"enum": [1, 2]}))
    (first,) = state.masks(())
    right, wrong = ids(first)[0], next(t for t in range(model.vocab_size) if t not in ids(first))
    assert len(state.masks([wrong, right])) == 1
    assert len(state.masks([right, wrong])) == 2 or state.is_complete
    assert len(state.masks([model.eos_ids[0]])) == 1, "nothing follows an end token"


def test_what_no_text_can_follow_is_said_before(grammars: Grammars) -> None:
    endless = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    deeper = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
    wrong: Sequence[tuple[Mapping[str, Any], str]] = (
        ({"not": {}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "greater"),
        ({"type": "string", "format": "nonsense"}, "nonsense"),
        (endless, "no token"),
        (deeper, "without end"),
    )
    for value, word in wrong:
        assert word in grammars.problem(schema(value)), value
    assert "\n" not in grammars.problem(LLMatcher.grammar_from_lark("start: nothing"))
    assert grammars.problem(schema(PERSON)) == ""
    assert grammars.problem("no JSON at all") != ""


def test_too_much_work_is_an_error_of_the_text_and_not_of_its_past(grammars: Grammars) -> None:
    """A state whose limit is reached reads its tokens again with a new one, which decides."""
    heavy = LLMatcher.grammar_from_lark("start: /(.{0,400}[ab]){40}/")
    state = grammars.follow(heavy)
    if state.error:
        assert state.masks(()) == [] and state.forced(4) == []
        return
    for _ in range(300):
        if not (masks := state.masks(())):
            break
        state.push(ids(masks[0])[5:6])
    if state.error:
        again = grammars.follow(heavy)
        again.push(range(0))
        assert "limit" in state.error or state.error


def test_an_id_names_the_vocabulary(tokenizer: Tokenizer, model: ModelConfig, grammars: Grammars) -> None:
    again = grammars_of(Tokenizer(tokenizer.definition), model)
    assert again is not None and again.id == grammars.id and "llguidance" in grammars.id
    assert grammars_of(None, model) is None

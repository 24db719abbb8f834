"""What a grammar lets through fits its schema: random schemas, random answers, judged by the library `jsonschema`."""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from random import Random
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.errors import BadRequest
from blockrelay.text.grammars import Grammars, GrammarState, grammars_of
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.api.openai.schemas import CompletionRequest
from blockrelay_gateway.api.structured_output import StructuredOutput
from tests.support.project import ROOT

Schema = Mapping[str, Any]
WORDS = ("a", "b", "name", "größe", "x y", 'qu"ote', "back\\slash", "tab\t")
LONGEST = 400


def schema_of(rng: Random, depth: int = 0) -> Schema:
    """A random schema of the supported keywords, satisfiable or not."""
    kinds = [plain_text, whole_number, number, text_by_pattern, date, fixed, truth]
    if depth < 3:
        kinds += [an_object, an_object, an_array, either, both, nullable]
    make: Callable[[Random, int], Schema] = rng.choice(kinds)
    return make(rng, depth)


def plain_text(rng: Random, depth: int) -> Schema:
    least = rng.choice([0, 0, 3])
    return {"type": "string", "minLength": least, "maxLength": least + rng.choice([0, 2, 9])}


def text_by_pattern(rng: Random, depth: int) -> Schema:
    return {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", "^(foo|bar)+$", "^[0-9]{3}-[A-Z]$", "z$", "^ä"])}


def date(rng: Random, depth: int) -> Schema:
    return {"type": "string", "format": rng.choice(["date", "time", "date-time", "uuid", "ipv4", "email"])}


def whole_number(rng: Random, depth: int) -> Schema:
    least = rng.randint(-1000, 1000)
    limits: dict[str, Any] = {rng.choice(["minimum", "exclusiveMinimum"]): least}
    if rng.random() < 0.6:
        limits[rng.choice(["maximum", "exclusiveMaximum"])] = least + rng.randint(1, 500)
    if rng.random() < 0.3:
        limits["multipleOf"] = rng.choice([2, 5, 7])
    return {"type": "integer", **limits}


def number(rng: Random, depth: int) -> Schema:
    least = rng.uniform(-10, 10)
    return {"type": "number", "minimum": round(least, 2), "maximum": round(least + rng.uniform(0.1, 50), 2)}


def fixed(rng: Random, depth: int) -> Schema:
    values = [1, -2.5, "x", None, True, [1, "a"], {"k": {"d": []}}, *WORDS]
    return {"enum": rng.sample(values, 3)} if rng.random() < 0.7 else {"const": rng.choice(values)}


def truth(rng: Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def an_object(rng: Random, depth: int) -> Schema:
    names = rng.sample(WORDS, rng.randint(0, 4))
    found: dict[str, Any] = {"type": "object", "properties": {name: schema_of(rng, depth + 1) for name in names}}
    found["required"] = [name for name in names if rng.random() < 0.6]
    if rng.random() < 0.7:
        found["additionalProperties"] = False
    elif rng.random() < 0.5:
        found["additionalProperties"] = schema_of(rng, depth + 1)
    return found


def an_array(rng: Random, depth: int) -> Schema:
    found: dict[str, Any] = {"type": "array", "items": schema_of(rng, depth + 1), "maxItems": rng.randint(1, 3)}
    if rng.random() < 0.5:
        found["minItems"] = 1
    if rng.random() < 0.3:
        found["prefixItems"] = [schema_of(rng, depth + 1)]
    return found


def either(rng: Random, depth: int) -> Schema:
    return {rng.choice(["anyOf", "oneOf"]): [schema_of(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


def both(rng: Random, depth: int) -> Schema:
    return {"allOf": [schema_of(rng, depth + 1), schema_of(rng, depth + 1)]}


def nullable(rng: Random, depth: int) -> Schema:
    return {"anyOf": [schema_of(rng, depth + 1), {"type": "null"}]}


def answer(state: GrammarState, rng: Random, endings: np.ndarray) -> list[int]:
    """The tokens of a random text; those that end strings, lists and objects come often."""
    tokens = list[int]()
    while not state.is_complete and len(tokens) < LONGEST:
        (mask,) = state.masks(())
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        soon = allowed[endings[allowed]]
        tokens.append(int(rng.choice((soon if len(soon) and rng.random() < 0.4 else allowed).tolist())))
        if tokens[-1] in (0, 1):  # end tokens of the bundled model
            return tokens[:-1]
        state.push(tokens[-1:])
    return tokens if state.is_complete else []


def check_time(text: str, form: str) -> None:
    if form == "date":
        datetime.strptime(text, "%Y-%m-%d")
    elif form in ("time", "date-time"):
        datetime.fromisoformat(text if form == "date-time" else f"2024-01-01T{text}")


def check_formats(schema: Any, value: Any) -> None:
    """Raises ValueError for a text that is no date or time although the schema of a property says so."""
    if isinstance(schema, dict) and isinstance(value, str) and "format" in schema:
        check_time(value, schema["format"])  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(schema, dict) and isinstance(value, dict):
        for name, inner in schema.get("properties", {}).items():  # pyright: ignore
            if name in value:
                check_formats(inner, value[name])


@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=[pytest.mark.thorough, pytest.mark.timeout(1800)])])
def test_random_answers_fit_random_schemas(count: int) -> None:
    folder = open_block_folder(ROOT / "shared/blockrelay/models/storyteller", blocks=())
    assert folder.tokenizer_path is not None
    tokenizer = Tokenizer.from_file(folder.tokenizer_path)
    grammars = grammars_of(tokenizer, folder.model)
    assert isinstance(grammars, Grammars)
    structured = StructuredOutput(grammars)
    endings = np.array([tokenizer.token_bytes(t)[:1] in (b'"', b"}", b"]") for t in range(folder.model.vocab_size)])
    made = refused = 0
    for seed in range(count):
        rng = Random(seed)
        schema = schema_of(rng)
        try:
            grammar, _ = structured.grammar_of(CompletionRequest(prompt="a", guided_json=schema))
        except BadRequest:
            refused += 1
            continue
        tokens = answer(grammars.follow(grammar), rng, endings)
        if not tokens:
            continue
        made += 1
        text = tokenizer.decode(tokens)
        value = json.loads(text)
        problems = [problem.message for problem in Draft202012Validator(schema).iter_errors(value)]
        assert not problems, f"seed {seed}: {text} is an answer for {json.dumps(schema)}: {problems}"
        check_formats(schema, value)
    assert made > 0.5 * count, f"{made} answers, {refused} schemas refused"

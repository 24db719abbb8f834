"""Turns the fields that ask for structured output into a grammar, in the spellings of OpenAI, vLLM and llama.cpp.

A schema is obeyed whether or not it says `strict`. JSON is written on one line, with `", "` and `": "` between its
parts, as `json.dumps` does: a model that may add blanks sometimes adds nothing else.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, cast

from blockrelay.block_folder.model import ModelConfig
from blockrelay.errors import BadRequest
from blockrelay.text.grammars import Grammars, checked_grammars, grammars_of
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.api.common_schemas import SamplingFields
from blockrelay_gateway.api.schema_formats import with_patterns

#: Most bytes of a schema, regular expression or grammar; most nested objects and arrays of a schema; most choices.
MAX_BYTES, MAX_DEPTH, MAX_OPTIONS = 64 << 10, 64, 1024
#: Grammars whose check is remembered.
REMEMBERED = 64
#: How llguidance writes JSON.
_JSON_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: The fields that `grammar_of` reads, each with the kind of grammar that its value is.
_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}
#: What a body with one of the fields contains. Such a body is read off the event loop, since its grammar takes time.
MARKS = (b"response_format", b"structured_outputs", b"guided_", b'"json_schema"', b'"grammar"', b'"tools"')


class StructuredOutput:
    """Makes and checks the grammars of requests for one model. Safe to share between threads."""

    def __init__(self, grammars: Grammars | None) -> None:
        """Without `grammars`, requests that ask for structured output are refused."""
        self._grammars = grammars
        self._problem = lru_cache(REMEMBERED)(grammars.problem) if grammars is not None else None

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, model: ModelConfig) -> "StructuredOutput":
        """Returns that of a model, which has none without a tokenizer, end tokens or llguidance."""
        return cls(grammars_of(tokenizer, model))

    @property
    def is_available(self) -> bool:
        """Whether requests may ask for structured output."""
        return self._grammars is not None

    def prepare(self) -> None:
        """Does what the first grammar would wait for."""
        if self._grammars is not None:
            self._grammars.prepare()

    def grammar_of(self, fields: SamplingFields, calls: tuple[str, str] | None = None) -> tuple[str, str]:
        """Returns the grammar that a request's fields ask for, and the id of workers that read it; "" and "": none.

        `calls` has both for a request whose answer may call tools: with what `json_beside_tools` returns. Raises
        BadRequest, with the field, for a grammar that cannot be followed, and for two at once.
        """
        if calls is not None:
            return calls
        if (asked := _one_asked(fields)) is None:
            return "", ""
        param, kind, value = asked
        return self.made(lambda _: _READERS[kind](value, param), param)

    def json_beside_tools(self, fields: SamplingFields) -> str:
        """Returns the JSON schema of answers without calls, as `json_grammar` does, of a request with tools; "": none.

        Raises BadRequest, with the field, for an answer that is to be anything else than JSON.
        """
        if (asked := _one_asked(fields)) is None:
            return ""
        param, kind, value = asked
        if kind != "json":
            message = f"{param} and tools both say what the text is like: send one, or tool_choice none"
            raise BadRequest(message, param=param)
        return self.json_grammar(_schema(value, param), param)

    def made(self, make: Callable[[Grammars], str], param: str) -> tuple[str, str]:
        """Returns the grammar that `make` makes, and the id of workers that read it.

        Raises BadRequest, with the field `param`, if no text can follow it, or the service has no grammars.
        """
        grammars = checked_grammars(self._grammars, param)
        assert self._problem is not None
        grammar = make(grammars)
        if problem := self._problem(grammar):
            raise BadRequest(f"{param} cannot be followed: {problem}", param=param)
        return grammar, grammars.id

    def json_grammar(self, schema: Mapping[str, Any], param: str) -> str:
        """Returns a checked JSON schema as Lark grammars contain it, behind `%json`. Raises BadRequest."""
        text = _written(schema, param)
        self.made(lambda _: f"start: %json {text}", param)
        return text


def _one_asked(fields: SamplingFields) -> tuple[str, str, Any] | None:
    """Returns what `_asked` yields, None for nothing. Raises BadRequest for two things at once."""
    asked = list(_asked(fields))
    if len(asked) > 1:
        message = f"{asked[0][0]} and {asked[1][0]} both say what the text is like: send one"
        raise BadRequest(message, param=asked[1][0])
    return asked[0] if asked else None


def _asked(fields: SamplingFields) -> Iterator[tuple[str, str, Any]]:
    """Yields for each thing that is asked for: the field's name, the kind of grammar, and its value."""
    if (form := fields.response_format) is not None:
        yield from _response_format(form)
    if (outputs := fields.structured_outputs) is not None:
        for name, value in outputs.model_dump(exclude_none=True, by_alias=True).items():
            param = f"structured_outputs.{name}"
            if name != "json_object":
                yield param, name, value
            elif value:
                yield param, "json", {"type": "object"}
    for name, kind in _FIELDS.items():
        value = getattr(fields, name)
        if value is not None and (name, value) != ("grammar", ""):  # llama.cpp's default, which its clients send
            yield name, kind, value


def _response_format(form: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    kind, nested = form.get("type"), form.get("json_schema")
    if kind == "json_object":
        yield "response_format", "json", form.get("schema") or {"type": "object"}  # llama.cpp sends a schema here
    elif kind == "json_schema":
        inner = cast(Mapping[str, Any], nested) if isinstance(nested, dict) else form
        if (schema := inner.get("schema")) is None:
            message = "response_format of type json_schema needs json_schema.schema"
            raise BadRequest(message, param="response_format.json_schema.schema")
        yield "response_format.json_schema.schema", "json", schema
    elif kind != "text":
        message = "response_format.type must be text, json_object or json_schema"
        named = json.dumps(kind)[:40] if isinstance(kind, str) else "another type"  # which may be nested without end
        raise BadRequest(f"{message}, not {named}", param="response_format.type")


def _schema(schema: object, param: str) -> dict[str, Any]:
    """Returns a checked JSON schema: an object, true, or the JSON of one."""
    if isinstance(schema, str):
        check_size(schema, param)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"{param} is not JSON: {str(error)[:100]}", param=param) from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise BadRequest(f"{param} must be a JSON schema: an object", param=param)
    check_depth(schema, param)
    return cast(dict[str, Any], schema)


def _json(schema: object, param: str) -> str:
    """Returns the grammar of the JSON texts that fit `schema`."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(_written(_schema(schema, param), param), overrides=_JSON_FORM)


def _regex(pattern: object, param: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(_check_text(pattern, param))


def _choice(options: object, param: str) -> str:
    """Returns the grammar of one of several texts."""
    texts = cast(list[object], options) if isinstance(options, list) else []
    if not 1 <= len(texts) <= MAX_OPTIONS or not all(isinstance(one, str) and one for one in texts):
        raise BadRequest(f"{param} must be a list of 1 to {MAX_OPTIONS} texts that are not empty", param=param)
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(check_size("start: " + " | ".join(map(json.dumps, texts)), param))


def _grammar(text: object, param: str) -> str:
    """Returns the grammar of a text in Lark's notation, or in GBNF, llama.cpp's."""
    source = _check_text(text, param)
    if "<[" in source:  # a number is another token in each model
        raise BadRequest(f"{param}: tokens by their numbers, as <[5]>, are not supported: use names", param=param)
    from llguidance import grammar_from

    try:
        return grammar_from("grammar", source)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{param} cannot be read: {str(error)[:200]}", param=param) from None


_READERS = {"json": _json, "regex": _regex, "choice": _choice, "grammar": _grammar}


def _check_text(value: object, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{param} must be text that is not empty", param=param)
    return check_size(value, param)


def check_size(text: str, param: str) -> str:
    """Returns `text`. Raises BadRequest if it is larger than MAX_BYTES, or not Unicode."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise BadRequest(f"{param} has half of a surrogate pair, which no text can contain", param=param)
    if (size := len(text.encode())) > MAX_BYTES:
        raise BadRequest(f"{param} has {size} bytes; at most {MAX_BYTES} are read", param=param)
    return text


def _written(schema: Mapping[str, Any], param: str) -> str:
    """Returns the text of a JSON schema that is not nested too deep, with the form of its JSON.

    What it says itself to llguidance is left out: that can switch off keywords. Raises BadRequest if it is too large,
    not Unicode, or has a number that JSON does not have.
    """
    changed = {**with_patterns(schema), "x-guidance": _JSON_FORM}
    try:
        check_size(json.dumps(changed, ensure_ascii=False, allow_nan=False), param)
    except ValueError:
        raise BadRequest(f"{param} has NaN or an infinite number, which JSON does not have", param=param) from None
    return check_size(json.dumps(changed), param)


def check_depth(schema: object, param: str) -> None:
    """Raises BadRequest if more than MAX_DEPTH objects and arrays are nested; found without recursion."""
    level: list[object] = [schema]
    for _ in range(MAX_DEPTH + 1):
        inner = list[object]()
        for one in level:
            if isinstance(one, dict):
                inner += cast(dict[str, object], one).values()
            elif isinstance(one, list):
                inner += cast(list[object], one)
        if not inner:
            return
        level = inner
    raise BadRequest(f"{param} is nested more than {MAX_DEPTH} levels deep", param=param)
